"""Commands for components, configurations and datasets: `list`, `configs`, `pack`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from unimetric.errors import UnimetricError, closest
from unimetric.images import QUALITY

if TYPE_CHECKING:
    from rich.console import Console


def list_(
    kind: Annotated[
        str, typer.Argument(help="Component type, such as `losses`, `miners` or `metrics`; or `settings` (default: all types).")
    ] = "",
    name: Annotated[str, typer.Argument(help="Component to describe.")] = "",
) -> None:
    """List components and settings, or describe one component.

    Examples:

    - `unimetric list`
    - `unimetric list losses`
    - `unimetric list losses margin`
    - `unimetric list settings`
    """
    from rich.console import Console

    from unimetric.cli.catalogue import catalogue, columns, settings
    from unimetric.spec import KINDS, names

    console = Console(highlight=False)
    if not kind:
        for each in KINDS:
            console.print(f"[bold]{each}[/bold]: {', '.join(names(each))}")
        return
    if kind == "settings":
        rows = [row for row in settings() if name in ("", row[0])]
        if not rows:
            raise UnimetricError(f"unknown setting `{name}`", closest(name, [row[0] for row in settings()]))
        _print_records(console, rows)
        return
    if kind not in KINDS:
        homes = [each for each in KINDS if kind in names(each)]
        hint = f"write `unimetric list {homes[0]} {kind}`" if homes else closest(kind, [*KINDS, "settings"])
        raise UnimetricError(f"unknown component type `{kind}`", hint)
    if name:
        _describe(console, kind, name)
    else:
        _print_table(console, columns(kind), [tuple(row[column] for column in columns(kind)) for row in catalogue(kind)])


def _describe(console: Console, kind: str, name: str) -> None:
    """Print a component: its call, what it computes, its citation and its arguments."""
    from unimetric.cli.catalogue import arguments, call, description
    from unimetric.spec import declaration

    declared = declaration(kind, name)
    console.print(f"{call(name, declared)}\n", markup=False, style="bold", soft_wrap=True)
    console.print(f"{description(declared)}\n", markup=False, soft_wrap=True)
    _print_records(console, arguments(declared))


def _print_records(console: Console, rows: Iterable[tuple[str, str, str, str]]) -> None:
    """Print arguments or settings: name, default and allowed values, with the meaning below."""
    from rich.padding import Padding
    from rich.text import Text

    for name, allowed, default, meaning in rows:
        shown = default if default in ("required", "from the run") else f"default {default or 'empty'}"
        console.print(Text.assemble((name, "bold"), f": {allowed}; {shown}"))
        console.print(Padding(Text(meaning), (0, 0, 0, 4)))


def _print_table(console: Console, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def configs(
    action: Annotated[str, typer.Argument(help="`show` prints a configuration, `copy` copies it (default: list all).")] = "",
    name: Annotated[str, typer.Argument(help="Name of a configuration.")] = "",
    to: Annotated[Path | None, typer.Argument(help="File or folder of the copy (default: `NAME.toml`).")] = None,
) -> None:
    """List the configurations of the package, or copy one to edit it.

    Examples:

    - `unimetric configs`
    - `unimetric configs show glyphs_margin`
    - `unimetric configs copy glyphs_margin my.toml`
    """
    from rich.console import Console

    from unimetric.config import shipped_configs
    from unimetric.files import write_text

    shipped = shipped_configs()
    if not action:
        console = Console(highlight=False)
        for folder, title in (("configs", "Runs: unimetric train NAME"), ("studies", "Studies: unimetric bench NAME")):
            console.print(f"[bold]{title}[/bold]")
            _print_table(console, ("name", ""), [(each, _headline(file)) for each, file in shipped.items() if file.parent.name == folder])
        return
    if action not in ("show", "copy"):
        hint = f"write `unimetric configs show {action}`" if action in shipped else closest(action, ("show", "copy"))
        raise UnimetricError(f"`unimetric configs` must be followed by `show` or `copy`, got `{action}`", hint)
    if name not in shipped:
        raise UnimetricError(f"no configuration `{name}`", closest(name, shipped))
    text = shipped[name].read_text(encoding="utf-8")
    if action == "show":
        print(text, end="")
        return
    copy = (to / f"{name}.toml" if to.is_dir() else to) if to else Path(f"{name}.toml")
    if copy.exists():
        raise UnimetricError(f"{copy}: exists already", f"name another file: `unimetric configs copy {name} FILE.toml`")
    write_text(copy, text)
    print(f"{copy}; run it with: unimetric {'bench' if shipped[name].parent.name == 'studies' else 'train'} {quote(str(copy))}")


def _headline(file: Path) -> str:
    """Return the first line of a configuration, which is a comment that describes it."""
    return file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()


def pack(
    dataset: Annotated[str, typer.Argument(help="Dataset spec string, such as `cub200` or `folder(root='images')`.")],
    out: Annotated[Path, typer.Option(help="Output file, with the extension .pack.")],
    short_side: Annotated[int, typer.Option(help="Length of the shorter side in pixels; 0: original size, as in the papers.", min=0)] = 256,
    encoding: Annotated[str, typer.Option(help="Image encoding: jpeg, webp, png (lossless) or raw (decoded).")] = "jpeg",
    quality: Annotated[int, typer.Option(help="Quality of JPEG and WebP, from 1 to 100.")] = QUALITY,
    workers: Annotated[int, typer.Option(help="Number of threads that decode and encode.")] = 2,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skipping of unreadable images, with a list of them.")] = False,
) -> None:
    """Store a dataset at training size in one file, for faster reading.

    Examples:

    - `unimetric pack cub200 --out cub.pack`
    - `unimetric pack cub200 --short-side 0 --out cub.pack`
    - `unimetric pack "folder(root='images')" --out images.pack --short-side 320 --encoding raw`
    """
    from unimetric.images.packing import write
    from unimetric.images.table import describe_shared
    from unimetric.runs.display import Display
    from unimetric.spec import create

    table = create("datasets", dataset)
    if both := describe_shared(table):
        advice = "add `train=0.5` to split by class, or evaluate on known classes with `split=standard(known_classes=True)`"
        logging.getLogger("unimetric").warning("%s; %s", both, advice)
    with Display() as display:
        packed = write(
            out,
            table,
            short_side=short_side or None,
            encoding=encoding,
            quality=quality,
            workers=workers,
            on_bad_picture="skip" if skip_bad else "error",
            progress=partial(display.step, "packing"),
        )
        for name, reason in packed.skipped:
            display.line(f"skipped {name}: {reason}")
        display.line(f"{out}: {len(packed):,} images, {out.stat().st_size / 2**20:,.1f} MiB")
        if short_side in packed.sizes.min(1):
            display.line(f"images have a shorter side of at most {short_side} pixels; --short-side 0 keeps their own, as in the papers")
        display.line(f"train on it with: unimetric train CONFIG \"dataset=pack(path='{out}')\"")
