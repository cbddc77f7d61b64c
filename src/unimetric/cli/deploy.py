"""Commands that turn runs into artifacts: `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[Path, typer.Option(help="Output folder.")],
    backbone: Annotated[str, typer.Option(help="Backbone spec string that locates the frozen weights, if they have moved.")] = "",
) -> None:
    """Write all weights of a run, trained and frozen, to one folder.

    LoRA is multiplied into the frozen weights.

    Examples:

    - `unimetric export runs/puma --out puma`
    """
    from unimetric.deploy.export import export as run_export

    folder = run_export(run, out, backbone=backbone)
    print(f"{folder}: {(folder / 'model.safetensors').stat().st_size / 2**20:,.1f} MiB; evaluate it with: unimetric evaluate {folder}")
    print("if the dataset is elsewhere on that machine, add its location, such as \"dataset=folder(root='images')\"")
