"""Commands that turn runs into artifacts: `export`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from unimetric.cli.options import Settings, read_overrides
from unimetric.errors import UnimetricError


def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[Path, typer.Option(help="Output folder, or file of a format such as onnx.")],
    settings: Settings = None,
    to: Annotated[str, typer.Option(help="Format: onnx, onnx(precision='fp16'), hub, torch_export (default: folder for Unimetric).")] = "",
    backbone: Annotated[str, typer.Option(help="Backbone spec string that locates the frozen weights, if they have moved.")] = "",
    images: Annotated[int, typer.Option(help="Test images on which recall@1 is compared with torch; 0 for none.", min=0)] = 2000,
    force: Annotated[bool, typer.Option("--force", help="Write a file that loses more than 0.5 points of recall@1.")] = False,
    shift: Annotated[Path | None, typer.Option(help="JSON file of `unimetric shift`, for the model card of `--to hub`.")] = None,
    push: Annotated[str, typer.Option(help="Repository of the Hugging Face hub, `owner/name`, for `--to hub`.")] = "",
) -> None:
    """Write a run to one folder or file, for Unimetric or other programs.

    LoRA is multiplied into the frozen weights.

    Examples:

    - `unimetric export runs/puma --out puma`
    - `unimetric export runs/mine --to onnx --out mine.onnx`
    - `unimetric export runs/mine --to "onnx(precision='int8')" --out mine.onnx`
    - `unimetric export runs/mine --to hub --out mine --push owner/name`
    """
    from unimetric.deploy.export import check_repository, export_as, push_folder
    from unimetric.deploy.export import export as run_export
    from unimetric.runs.display import Display

    overrides = read_overrides(settings, export)
    for option, value in (("--push", push), ("--shift", shift)):
        if value and to.partition("(")[0] != "hub":
            raise UnimetricError(f"`{option}` requires `--to hub`, got `--to {to}`", f"use `--to hub`, or remove `{option}`")
    if push:
        check_repository(push)
    if not to:
        if overrides:
            raise UnimetricError(f"`{next(iter(overrides))}` requires `--to`", "remove it: the folder keeps the settings of the run")
        folder = run_export(run, out, backbone=backbone)
        print(f"{folder}: {(folder / 'model.safetensors').stat().st_size / 2**20:,.1f} MiB")
        print(f"evaluate it with: unimetric evaluate {quote(str(folder))}")
        print("if the dataset is elsewhere on that machine, add its location, such as \"dataset=folder(root='images')\"")
        return
    with Display() as display:
        options: dict[str, Any] = {"to": to, "backbone": backbone, "images": images, "force": force, "shift": shift or ""}
        export_as(run, out, note=display.line, progress=partial(display.step, "comparing"), **options, **overrides)
        size = sum(file.stat().st_size for file in ([out] if out.is_file() else out.iterdir()))
        display.line(f"{out}: {size / 2**20:,.1f} MiB")
        if out.is_file() and out.suffix != ".pt2":  # opening one may run code, so `evaluate` does not
            command = f"unimetric evaluate {quote(str(out))}"
            display.line(f'evaluate it with: {command}; add "dataset=..." if the images are elsewhere on that machine')
    if push:
        print(push_folder(out, push))
