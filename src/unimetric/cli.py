"""The command line: one function a verb, which does nothing itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from unimetric.errors import Interrupted, UnimetricError

app = typer.Typer(
    help="Train image embeddings, and measure them on classes, shifts and datasets never seen.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

Settings = Annotated[list[str] | None, typer.Argument(help="Settings as `key=value`, over those of the file.", show_default=False)]


def main() -> None:
    """The command `unimetric`: mistakes that the user can mend end with a sentence, a hint and exit code 2."""
    try:
        app(standalone_mode=True)
    except UnimetricError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Interrupted as stop:
        print(f"stopped: {stop}", file=sys.stderr)
        sys.exit(130)


def _load(config: str | None, settings: list[str] | None) -> Any:
    from unimetric.config import load, override

    words = list(settings or [])
    if config is not None and "=" in config and not config.endswith(".toml"):  # settings alone, without a file
        words, config = [config, *words], None
    return load(config, **dict(override(word) for word in words))


@app.command()
def train(
    config: Annotated[str | None, typer.Argument(help="A run's TOML file; without one, the defaults.", show_default=False)] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; default `runs/<id>`. An interrupted run goes on in it.")] = None,
    quiet: Annotated[bool, typer.Option(help="Show nothing but the result.")] = False,
) -> None:
    """Train a model, or go on with one that was interrupted.

    Examples:

    - `unimetric train configs/glyphs_margin.toml`
    - `unimetric train configs/cub200_margin.toml seed=3 "loss=margin(beta=0.6)" --out runs/a`
    """
    from unimetric.engine.train import train as run

    run_config = _load(config, settings)
    folder = out or Path("runs") / run_config.run_id
    best = run(run_config, folder, quiet=quiet)
    print(f"best epoch {best['epoch']} (chosen on {best['chosen_on']}): {_numbers(best)}")
    print(f"see {folder}; measure more with: unimetric evaluate {folder}")


def _numbers(line: dict[str, Any]) -> str:
    return "  ".join(f"{key} {value:.4f}" for key, value in line.items() if "/" in key and not key.startswith("term/"))


@app.command()
def evaluate(
    target: Annotated[str, typer.Argument(help="A run folder, an .npz file of `embeddings` and `labels`, or a backbone.")],
    settings: Settings = None,
    metrics: Annotated[str, typer.Option(help="Metrics, separated by semicolons; default the run's own.")] = "",
    part: Annotated[str, typer.Option(help="Which rows: test, validation or train.")] = "test",
    rerank: Annotated[bool, typer.Option("--rerank", help="Put neighbours into k-reciprocal order first.")] = False,
    level: Annotated[float, typer.Option(help="Confidence intervals of this level, such as 0.95.")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="A JSON file for the numbers.")] = None,
    save: Annotated[Path | None, typer.Option(help="An .npz file for embeddings and labels.")] = None,
    explain: Annotated[bool, typer.Option(help="Say what each number means.")] = False,
) -> None:
    """Measure a run, embeddings made elsewhere, or a network without training.

    Examples:

    - `unimetric evaluate runs/a --metrics "recall(k=1); map_at_r; nmi" --explain`
    - `unimetric evaluate embeddings.npz --metrics "recall(k=1)"`
    - `unimetric evaluate "timm(name='resnet50', pretrained=True)" dataset=cub200`
    """
    from unimetric.config import from_settings, override
    from unimetric.engine.display import Display
    from unimetric.engine.evaluate import evaluate as run
    from unimetric.engine.evaluate import evaluate_file
    from unimetric.metrics import explain as meaning

    texts = [text.strip() for text in metrics.split(";") if text.strip()]
    overrides = dict(override(word) for word in settings or [])
    with Display() as display:

        def progress(done: int, total: int) -> None:
            display.step("embedding", done, total)

        if target.endswith(".npz"):
            numbers = evaluate_file(target, metrics=texts, rerank=rerank, level=level)
        elif Path(target).is_dir():
            numbers = run(target, metrics=texts, part=part, rerank=rerank, level=level, save=save, progress=progress, **overrides)
        else:
            config = from_settings({"backbone": target, "head": "identity"} | overrides, "evaluate")
            numbers = run(config, metrics=texts, part=part, rerank=rerank, level=level, save=save, progress=progress)
        for name, value in numbers.items():
            display.line(f"{name:<32} {value:.4f}" + (f"   {meaning(name.partition('/')[0])}" if explain else ""))
    if out is not None:
        from unimetric.engine.checkpoint import write_text

        write_text(out, json.dumps(numbers, indent=1))


@app.command("list")
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

    from unimetric.catalogue import catalogue, columns
    from unimetric.errors import closest
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


@app.command()
def check(
    configs: Annotated[list[Path], typer.Argument(help="TOML files.")],
    data: Annotated[bool, typer.Option(help="Read the datasets, too.")] = False,
) -> None:
    """Check runs without running them: keys, arguments, and whether the parts fit together.

    Examples:

    - `unimetric check configs/*.toml`
    - `unimetric check --data configs/cub200_margin.toml`
    """
    from unimetric.config import load
    from unimetric.engine.model import check_fit

    for path in configs:
        config = load(path)
        check_fit(config, str(path))
        if data:
            from unimetric.engine.evaluate import read_table

            read_table(config)
        print(f"{path}: good, run {config.run_id}")


@app.command()
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
    from unimetric.engine.display import Display
    from unimetric.pack import write
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


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The run folder.")] = Path("runs/demo"),
) -> None:
    """Train on letters, test on letters never seen: two minutes on a laptop, no download.

    Example: `unimetric demo`
    """
    from unimetric.engine.demo import demo as run

    run(out)


if __name__ == "__main__":
    main()
