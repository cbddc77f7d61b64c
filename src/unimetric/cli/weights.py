"""Command that combines weights: `interpolate`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from unimetric.cli.options import Overrides, read_numbers, read_overrides
from unimetric.errors import UnimetricError


def interpolate(
    runs: Annotated[list[Path], typer.Argument(help="Run folders. Several are averaged.")],
    out: Annotated[Path, typer.Option(help="Output folder, which is read like a run folder.")],
    alpha: Annotated[float | None, typer.Option(help="Point between the start (0) and the end (1) of training.")] = None,
    alphas: Annotated[
        str, typer.Option(help="Points to choose from on validation classes, separated by commas (default: 0,0.1,...,1).")
    ] = "",
    tolerance: Annotated[float, typer.Option(help="Score on validation classes given up for a smaller alpha, such as 0.01.")] = 0.0,
    setting: Overrides = None,
) -> None:
    """Write weights between the start and the end of training.

    A smaller alpha forgets less of what the pretrained network knew. Test classes are never used for the choice.
    Several runs must start from the same weights; without `--alpha` and `--alphas`, their average is written.

    Examples:

    - `unimetric interpolate runs/mine --alpha 0.5 --out runs/half`
    - `unimetric interpolate runs/mine --alphas 0,0.25,0.5,0.75,1 --tolerance 0.01 --out runs/between`
    - `unimetric interpolate runs/a runs/b runs/c --out runs/soup`
    """
    from unimetric.deploy.interpolate import interpolate as run
    from unimetric.runs.display import Display

    if alpha is not None and alphas:
        raise UnimetricError("`--alpha` and `--alphas` exclude each other", "use `--alphas` to choose on validation classes")
    points = [alpha] if alpha is not None else read_numbers(alphas, "--alphas", float, like="0,0.5,1")
    overrides = read_overrides(setting, interpolate)
    with Display() as display:
        progress = partial(display.step, "embedding")
        found = run(runs, out, alphas=points, tolerance=tolerance, note=display.line, progress=progress, **overrides)
        chosen = " (chosen on validation classes)" if "validation" in found else ""
        display.line(f"{out}: alpha {found['alpha']:g}{chosen}; evaluate it with: unimetric evaluate {quote(str(out))}")
