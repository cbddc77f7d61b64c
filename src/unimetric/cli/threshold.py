"""Command that chooses a threshold: `calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unimetric.cli.index import calibrate_stored, is_index
from unimetric.cli.options import Settings, read_overrides
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
    from unimetric.runs.display import Display

    if out is not None and out.suffix != ".json":
        raise UnimetricError(f"`--out` must be a .json file, got {out}", f"use `--out {out.with_suffix('.json')}`")
    overrides = read_overrides(settings, calibrate)
    if is_index(run):
        calibrate_stored(run, fpr, level, draws, {"settings": overrides, "--out": out})
        return
    with Display() as display:
        result = choose(
            run,
            fpr=fpr,
            level=level,
            draws=draws,
            out=out,
            progress=lambda done, total: display.step("embedding", done, total),
            **overrides,
        )
        low, high = result["threshold_interval"]
        display.line(f"threshold {result['threshold']:.4f}   [{low:.4f}, {high:.4f}] over classes   score: {result['score']}")
        display.line(f"{'':<34} false positive rate            missed pairs of one class")
        rows = {"validation classes": "validation", "test classes": "test"}
        for name, key in rows.items():
            display.line(f"{name:<34} {_cells(result[key])}")
        name = f"test, threshold {result['train_threshold']:.4f} of training"
        display.line(f"{name:<34} {_cells(result['test_at_train_threshold'])}")
        file = run / FILE if out is None else out
        display.line(f"see {file} and {file.with_suffix('.png')}")


def _cells(part: dict[str, float | list[float]]) -> str:
    """Return both rates of a part with their intervals."""
    cells = []
    for key in ("fpr", "fnr"):
        low, high = part[f"{key}_interval"]  # type: ignore[misc]
        cells.append(f"{part[key]:.4f} [{low:.4f}, {high:.4f}]")
    return "        ".join(cells)
