"""Commands that make artifacts of runs: `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    backbone: Annotated[str, typer.Option(help="Where the frozen weights lie now, if not where the run says.")] = "",
) -> None:
    """Join what a run trained with the frozen weights it was trained in; LoRA is multiplied into them.

    Example: `unimetric export runs/puma --out puma`
    """
    from unimetric.deploy.export import export as run_export

    folder = run_export(run, out, backbone=backbone)
    print(f"{folder}: {(folder / 'model.safetensors').stat().st_size / 2**20:,.1f} MiB; measure it with: unimetric evaluate {folder}")
