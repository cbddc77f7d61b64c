"""Commands about datasets and components: `pack`, `list`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unimetric.errors import UnimetricError, closest


def list_(
    kind: Annotated[str, typer.Argument(help="losses, miners, metrics, ...; without one, all kinds.")] = "",
) -> None:
    """List the parts of a kind, with the paper each comes from.

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
        raise UnimetricError(f"there is no kind `{kind}`", closest(kind, kinds()))
    table = Table(box=None, pad_edge=False)
    for column in columns(kind):
        table.add_column(column, overflow="fold")
    for row in catalogue(kind):
        table.add_row(*(row[column] for column in columns(kind)))
    console.print(table, highlight=False)


def pack(
    dataset: Annotated[str, typer.Argument(help="A dataset, such as `cub200` or `folder(root='pictures')`.")],
    out: Annotated[Path, typer.Option(help="The file to write; it ends in .pack.")],
    short_side: Annotated[int, typer.Option(help="Pixels of the shorter side; 0 keeps each picture's own size.")] = 256,
    encoding: Annotated[str, typer.Option(help="jpeg, webp, png (lossless) or raw (decoded).")] = "jpeg",
    quality: Annotated[int, typer.Option(help="Of JPEG and WebP, 1 to 100.")] = 95,
    workers: Annotated[int, typer.Option(help="Threads that decode and encode.")] = 2,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out pictures that cannot be read, and list them.")] = False,
) -> None:
    """Store a dataset once, at the size that training needs, as one file that training reads from memory.

    Examples:

    - `unimetric pack cub200 --out cub.pack`
    - `unimetric pack "folder(root='pictures')" --out pictures.pack --short-side 320 --encoding raw`
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
        display.line(f"{out}: {len(packed):,} pictures, {out.stat().st_size / 2**20:,.1f} MiB")
        display.line(f"train on it with: unimetric train CONFIG \"dataset=pack(path='{out}')\"")
