"""Commands for datasets and components: `list`, `pack`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unimetric.errors import UnimetricError, closest
from unimetric.images import QUALITY


def list_(
    kind: Annotated[str, typer.Argument(help="Component type, such as `losses`, `miners` or `metrics` (default: all).")] = "",
) -> None:
    """List the components of one type, with the paper of each.

    Examples:

    - `unimetric list`
    - `unimetric list losses`
    """
    from rich.console import Console
    from rich.table import Table

    from unimetric.cli.catalogue import catalogue, columns
    from unimetric.spec import kinds, names

    console = Console()
    if not kind:
        for each in kinds():
            console.print(f"[bold]{each}[/bold]: {', '.join(names(each))}", highlight=False)
        return
    if kind not in kinds():
        raise UnimetricError(f"unknown component type `{kind}`", closest(kind, kinds()))
    table = Table(box=None, pad_edge=False)
    for column in columns(kind):
        table.add_column(column, overflow="fold")
    for row in catalogue(kind):
        table.add_row(*(row[column] for column in columns(kind)))
    console.print(table, highlight=False)


def pack(
    dataset: Annotated[str, typer.Argument(help="Dataset spec string, such as `cub200` or `folder(root='images')`.")],
    out: Annotated[Path, typer.Option(help="Output file, with the extension .pack.")],
    short_side: Annotated[int, typer.Option(help="Length of the shorter side in pixels; 0 keeps the original size.")] = 256,
    encoding: Annotated[str, typer.Option(help="Image encoding: jpeg, webp, png (lossless) or raw (decoded).")] = "jpeg",
    quality: Annotated[int, typer.Option(help="Quality of JPEG and WebP, from 1 to 100.")] = QUALITY,
    workers: Annotated[int, typer.Option(help="Number of threads that decode and encode.")] = 2,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skipping of unreadable images, with a list of them.")] = False,
) -> None:
    """Store a dataset at training size in one file, for faster reading.

    Examples:

    - `unimetric pack cub200 --out cub.pack`
    - `unimetric pack "folder(root='images')" --out images.pack --short-side 320 --encoding raw`
    """
    from unimetric.images.packing import write
    from unimetric.runs.display import Display
    from unimetric.spec import create

    table = create("datasets", dataset)
    with Display() as display:
        packed = write(
            out,
            table,
            short_side=short_side or None,
            encoding=encoding,
            quality=quality,
            workers=workers,
            on_bad_picture="skip" if skip_bad else "error",
            progress=lambda done, total: display.step("packing", done, total),
        )
        for name, reason in packed.skipped:
            display.line(f"skipped {name}: {reason}")
        display.line(f"{out}: {len(packed):,} images, {out.stat().st_size / 2**20:,.1f} MiB")
        display.line(f"train on it with: unimetric train CONFIG \"dataset=pack(path='{out}')\"")
