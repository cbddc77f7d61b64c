"""Command that chooses a threshold: `calibrate`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from unimetric.cli.index import calibrate_stored, format_interval, warn_of_copies
from unimetric.cli.options import Settings, check_outputs, read_overrides
from unimetric.errors import UnimetricError


def calibrate(
    run: Annotated[Path, typer.Argument(help="Run folder, trained with validation classes, or index folder.")],
    settings: Settings = None,
    fpr: Annotated[float, typer.Option(help="False positive rate: fraction of pairs of two classes that may be accepted.")] = 0.01,
    level: Annotated[float, typer.Option(help="Level of the intervals over classes.")] = 0.95,
    draws: Annotated[int, typer.Option(help="Bootstrap draws of whole classes.", min=2)] = 1000,
    out: Annotated[
        Path | None, typer.Option(help="JSON file; the figure is a PNG file of the same name (default: in the run folder).")
    ] = None,
) -> None:
    """Choose a threshold on validation classes, and check it on test classes.

    Examples:

    - `unimetric calibrate runs/a --fpr 0.01`
    - `unimetric calibrate my.index --fpr 0.01`
    - `unimetric calibrate runs/a --fpr 0.001 --out threshold.json device=cuda`
    """
    from unimetric.analysis.calibrate import FILE
    from unimetric.analysis.calibrate import calibrate as choose
    from unimetric.deploy.facts import check_index
    from unimetric.geometry.pair_scores import FEWEST
    from unimetric.runs.display import Display

    check_outputs(out)
    if out is not None and out.suffix != ".json":
        raise UnimetricError(f"`--out` must be a .json file, got {out}", f"use `--out {out.with_suffix('.json')}`")
    overrides = read_overrides(settings, calibrate)
    if check_index(run):
        calibrate_stored(run, fpr, level, draws, {"settings": overrides, "--out": out})
        return
    with Display() as display:
        result = choose(run, fpr=fpr, level=level, draws=draws, out=out, progress=partial(display.step, "embedding"), **overrides)
        interval = result["threshold_interval"]
        spread = f"   {format_interval(interval)} over classes" if interval else ""
        display.line(f"threshold {result['threshold']:.4f}{spread}   score: {result['score']}")
        display.line(f"{'':<34} false positive rate            missed pairs of one class")
        rows = {"validation classes": "validation", "test classes": "test"}
        for name, key in rows.items():
            display.line(f"{name:<34} {_cells(result[key])}")
        name = f"test, threshold {result['train_threshold']:.4f} of training"
        display.line(f"{name:<34} {_cells(result['test_at_train_threshold'])}")
        for name, key in rows.items():
            if result[key]["fpr_interval"] is None:
                count = result[key]["classes"]
                display.line(f"{name}: no intervals, which would be too narrow; at least {FEWEST} classes are needed, got {count}")
        if warning := warn_of_copies(result, result["validation"]["fnr"]):
            display.line(warning)
        file = run / FILE if out is None else out
        display.line(f"see {file} and {file.with_suffix('.png')}")


def _cells(part: dict[str, Any]) -> str:
    """Return both rates of a part with their intervals."""
    cells = [f"{part[key]:.4f} {format_interval(part[f'{key}_interval'])}" for key in ("fpr", "fnr")]
    return f"{cells[0]:<31}{cells[1]}".rstrip()
