"""The command line: one function a verb, which does nothing itself."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.models import OptionInfo

from unimetric.errors import FULL_DISK, Interrupted, UnimetricError, closest
from unimetric.files import write_text

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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name need not be UTF-8, nor the terminal
    try:
        app(standalone_mode=True)
    except UnimetricError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        print(f"error: {error.filename or 'the disk is full'}: {error.strerror}\n\nhint: free some room", file=sys.stderr)
        sys.exit(2)
    except Interrupted as stop:
        print(f"stopped: {stop}", file=sys.stderr)
        sys.exit(130)


def _load(config: str | None, settings: list[str] | None) -> Any:
    from unimetric.config import load

    words = list(settings or [])
    if config is not None and _is_setting(config):
        words, config = [config, *words], None
    return load(config, **_overrides(words, train))


def _is_setting(word: str) -> bool:
    return "=" in word and not word.endswith(".toml")


def _overrides(words: list[str] | None, verb: Any, *, axes: bool = False) -> dict[str, Any]:
    """Settings by name; an option of the verb is none of them. Only a grid has `axes`, whose names are the user's own."""
    from unimetric.config import RunConfig, override

    found = dict(override(word) for word in words or [])
    hints = get_type_hints(verb, include_extras=True)
    for key, value in found.items():
        if any(isinstance(mark, OptionInfo) for mark in getattr(hints.get(key), "__metadata__", ())):
            name = "--" + key.replace("_", "-")
            raise UnimetricError(f"`{key}={value}`: `{name}` is an option here, not a setting", f"write `{name} {value}`")
        if key not in RunConfig.__dataclass_fields__ and not axes:
            raise UnimetricError(f"settings: unknown key `{key}`", closest(key, RunConfig.__dataclass_fields__))
    return found


def _specs(text: str, option: str = "--metrics") -> list[str]:
    from unimetric.config import split_specs

    return split_specs(text, f"`{option}`")


def _numbers_in(words: str, option: str, kind: type[int] | type[float]) -> list[Any]:
    try:
        return [kind(word) for word in words.split(",") if word.strip()]
    except ValueError:
        raise UnimetricError(f"cannot read `{option} {words}`", f"write numbers with commas: `{option} {_LIKE[option]}`") from None


_LIKE = {"--prototypes": "0,5,9", "--targets": "10,50,90"}


def _beside(out: Path) -> None:
    if out.suffix == ".png":
        raise UnimetricError(f"{out}: the picture goes there, beside the numbers", f"write `--out {out.with_suffix('.json')}`")


def _write_json(out: Path | None, found: Any) -> None:
    if out is not None:
        write_text(out, json.dumps(found, indent=1))


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
    - `unimetric train dataset=cub200 "metrics=recall(k=1); map_at_r"`
    """
    from unimetric.engine.train import train as run

    run_config = _load(config, settings)
    folder = out or Path("runs") / run_config.run_id
    best = run(run_config, folder, quiet=quiet)
    print(f"best epoch {best['epoch']} (chosen on {best['chosen_on']}): {_numbers(best)}")
    for name, line in best.get("variants", {}).items():
        print(f"  {name}: best epoch {line['epoch']}: {_numbers(line)}")
    print(f"see {folder}; measure more with: unimetric evaluate {folder}")


def _numbers(line: dict[str, Any]) -> str:
    return "  ".join(f"{key} {value:.4f}" for key, value in line.items() if key.startswith(("validation/", "test/")))


@app.command()
def evaluate(
    target: Annotated[str, typer.Argument(help="A run folder, an .npz file of `embeddings` and `labels`, or a backbone.")],
    settings: Settings = None,
    metrics: Annotated[str, typer.Option(help="Metrics, separated by semicolons or as a TOML list (default: those of the run).")] = "",
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
    - `unimetric evaluate "timm(name='resnet50.tv_in1k', pretrained=True)" dataset=cub200`
    """
    from unimetric.config import from_settings
    from unimetric.engine.display import Display
    from unimetric.engine.evaluate import evaluate as run
    from unimetric.engine.evaluate import evaluate_file
    from unimetric.metrics import explain as meaning
    from unimetric.spec import names

    texts = _specs(metrics)
    overrides = _overrides(settings, evaluate)
    with Display() as display:

        def progress(done: int, total: int) -> None:
            display.step("embedding", done, total)

        if target.endswith(".npz"):
            geometry = str(overrides.pop("geometry", ""))
            if overrides or save is not None or part != "test":
                raise UnimetricError(
                    f"{target}: its embeddings are made, so other settings, --save and --part change nothing", "leave them out"
                )
            numbers = evaluate_file(target, metrics=texts, rerank=rerank, level=level, geometry=geometry)
        elif Path(target).is_dir():
            numbers = run(target, metrics=texts, part=part, rerank=rerank, level=level, save=save, progress=progress, **overrides)
        else:
            name = target.partition("(")[0]
            if ("." not in name and name not in names("backbones")) or "/" in name:
                raise UnimetricError(f"{target}: no such run folder, .npz file or backbone", closest(name, names("backbones")))
            config = from_settings({"backbone": target, "head": "identity"} | overrides, "evaluate")
            numbers = run(config, metrics=texts, part=part, rerank=rerank, level=level, save=save, progress=progress)
        for name, value in numbers.items():
            display.line(f"{name:<32} {value:.4f}" + (f"   {meaning(name.partition('/')[0])}" if explain else ""))
    _write_json(out, numbers)


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
    words: Annotated[list[str], typer.Argument(help="TOML files, and settings as `key=value`.", metavar="CONFIG|KEY=VALUE")],
    data: Annotated[bool, typer.Option(help="Also read the datasets.")] = False,
) -> None:
    """Check the settings of runs and whether their components fit together.

    Examples:

    - `unimetric check configs/*.toml`
    - `unimetric check --data configs/cub200_margin.toml seed=3`
    - `unimetric check dataset=cub200 "loss=margin(beta=0.6)"`
    """
    from unimetric.bench.grid import check_runs, is_grid, read_any
    from unimetric.config import load
    from unimetric.engine.evaluate import read_table
    from unimetric.engine.model import check_fit

    files: list[str | None] = [word for word in words if not _is_setting(word)]
    overrides = _overrides([word for word in words if _is_setting(word)], check, axes=bool(files))
    for path in files or [None]:
        if path is not None and is_grid(path):
            runs = read_any(path, **overrides)
            check_runs(runs, path)
            if data:
                for config in {(run.config.dataset, run.config.split): run.config for run in runs}.values():
                    read_table(config)
            print(f"{path}: good, {len(runs)} runs")
            continue
        config = load(path, **overrides)
        place = path or "settings"
        check_fit(config, place)
        if data:
            read_table(config)
        print(f"{place}: good, run {config.run_id}")


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


@app.command("explain")
def explain_(
    run: Annotated[Path, typer.Argument(help="A run folder whose head has prototypes, such as `crt`.")],
    pictures: Annotated[list[str], typer.Argument(help="Image files, or rows of a pack as `FILE.pack::ROW`.", metavar="IMAGE...")],
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("explain.png"),
    prototypes: Annotated[str, typer.Option(help="Their numbers, with commas; default the most active.")] = "",
    count: Annotated[int, typer.Option(help="How many of the most active.", min=1)] = 8,
) -> None:
    """Show which part of a picture each prototype looks at.

    Examples:

    - `unimetric explain runs/crt bird.jpg other.jpg --out prototypes.png`
    - `unimetric explain runs/crt cub.pack::17 --prototypes 0,5,9`
    """
    from unimetric.engine.explain import explain as run_

    numbers = _numbers_in(prototypes, "--prototypes", int)
    for number, weight in run_(run, pictures, out=out, prototypes=numbers, count=count):
        print(f"prototype {number:<4} mean weight {weight:.4f}")
    print(f"see {out}")


@app.command()
def split(
    dataset: Annotated[str, typer.Argument(help="A dataset, such as `cub200` or `pack(path='cub.pack')`.")],
    out: Annotated[Path, typer.Option(help="The JSON file to write; a picture of the progression goes beside it.")],
    settings: Settings = None,
    backbone: Annotated[str, typer.Option(help="What makes the features.")] = "timm(name='resnet50.tv_in1k', pretrained=True)",
    features: Annotated[Path | None, typer.Option(help="An .npz file of all rows' features: read if it is there, else written.")] = None,
    swaps: Annotated[int, typer.Option(help="Classes exchanged a step; 1000 for SOP.", min=1)] = 2,
    count: Annotated[int, typer.Option(help="Splits by exchanging, the first one included.", min=1)] = 25,
    easier: Annotated[int, typer.Option(help="Splits towards an easier one; 1 for none.", min=1)] = 15,
    removal: Annotated[bool, typer.Option(help="Go on by removing classes.")] = True,
    code_removal: Annotated[bool, typer.Option("--code-removal", help="Remove as the authors' script does.")] = False,
    plateau: Annotated[bool, typer.Option("--plateau", help="End exchanging when the distance no longer rises.")] = False,
    choose: Annotated[int, typer.Option(help="How many to choose, evenly over the distances.", min=1)] = 9,
    targets: Annotated[str, typer.Option(help="Distances to choose the nearest to instead, with commas.")] = "",
    seed: Annotated[int, typer.Option(help="Of the random halves that stand for no shift.", min=0)] = 0,
) -> None:
    """Make train-test splits of measured difficulty: ever further apart, by the Frechet distance of their classes (ooDML).

    Examples:

    - `unimetric split cub200 --features cub.npz --out cub_splits.json device=cuda`
    - `unimetric split cub200 --features cub.npz --out cub_splits.json --targets 19.2,28.5,52.6,72.2,92.5,120.4,136.5,152,173.9`
    - `unimetric split glyphs --backbone small --out splits.json transform=glyphs`
    """
    from unimetric.config import from_settings
    from unimetric.engine.display import Display
    from unimetric.engine.split import features_of, make_splits, write_splits

    _beside(out)
    wanted = _numbers_in(targets, "--targets", float)
    if not all(map(math.isfinite, wanted)):
        raise UnimetricError(f"cannot read `--targets {targets}`", f"write distances with commas: `--targets {_LIKE['--targets']}`")
    chosen = {"dataset": dataset, "backbone": backbone, "precision": "32-true"}
    config = from_settings(chosen | _overrides(settings, split), "split")
    with Display() as display:
        table, found = features_of(config, path=features, progress=lambda done, total: display.step("features", done, total))
        splits = make_splits(
            table,
            found,
            swaps=swaps,
            count=count,
            easier=easier,
            removal=removal,
            code_removal=code_removal,
            plateau=plateau,
            choose=choose,
            targets=wanted,
            seed=seed,
            progress=lambda done, total: display.step("splits", done, total),
        )
        made = str(features) if features is not None else config.backbone
        write_splits(out, splits, {"dataset": config.dataset, "features": made, "transform": config.transform})
        for number, entry in splits["splits"].items():
            display.line(f"split {number}: {entry['key']:>5}  distance {entry['distance']:8.4g}  (wanted {entry['target']:.4g})")
        display.line(f"{len(splits['history'])} splits; no shift would be {splits['no_shift']:.4g}; no harder after {splits['plateau']}")
        display.line(f"train on one with: unimetric train CONFIG \"split=ood(path='{out}', split=1)\"; see {out.with_suffix('.png')}")


@app.command()
def adapt(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    settings: Settings = None,
    shots: Annotated[int, typer.Option(help="Pictures of each test class to learn from.", min=1)] = 5,
    episodes: Annotated[int, typer.Option(help="How often, where they are drawn at random.", min=2)] = 10,
    draw: Annotated[str, typer.Option(help="published, random, or auto: published where there are any.")] = "auto",
    iterations: Annotated[int, typer.Option(help="Steps an episode; 0 for 1000 (2 shots) or 1500.", min=0)] = 0,
    looks: Annotated[int, typer.Option(help="Random crops of each picture; 0 for its centre alone.", min=0)] = 16,
    epoch: Annotated[str, typer.Option(help="Adapted weights: last or best.")] = "last",
    with_replacement: Annotated[bool, typer.Option(help="Draw support batches with replacement.")] = True,
    seed: Annotated[int, typer.Option(help="Of episodes, crops and batches.", min=0, max=2**32 - 1)] = 0,
) -> None:
    """Fine-tune the last layer on a few images of each test class.

    Examples:

    - `unimetric adapt runs/a --shots 5`
    - `unimetric adapt runs/a --shots 2 --draw random --episodes 10 device=cuda`
    """
    from unimetric.engine.adapt import adapt as run_
    from unimetric.engine.display import Display

    overrides = _overrides(settings, adapt)
    with Display() as display:
        result = run_(
            run,
            shots=shots,
            episodes=episodes,
            draw=draw,
            iterations=iterations,
            looks=looks,
            epoch=epoch,
            with_replacement=with_replacement,
            seed=seed,
            progress=lambda done, total: display.step("adapting", done, total),
            **overrides,
        )
        for name, (mean, half) in result["summary"].items():
            display.line(f"{name:<44} {mean:.4f} +- {half:.4f}")
        display.line(f"{len(result['episodes'])} episodes; see {run / f'adapt_{shots}_shots.json'}")


@app.command()
def transfer(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    to: Annotated[list[str], typer.Option(help="A dataset to test on; may be given again.")],
    metrics: Annotated[str, typer.Option(help="Metrics, separated by semicolons or as a TOML list (default: those of each run).")] = "",
    setting: Annotated[list[str] | None, typer.Option("--set", help="A setting as `key=value`, such as `device=cuda`.")] = None,
    out: Annotated[Path | None, typer.Option(help="A JSON file for the numbers.")] = None,
) -> None:
    """Test runs on datasets that they were not trained on.

    Examples:

    - `unimetric transfer runs/cub runs/cars --to cub200 --to cars196`
    - `unimetric transfer runs/cub --to "pack(path='cars.pack')" --set device=cuda --out transfer.json`
    """
    from unimetric.engine.display import Display
    from unimetric.engine.transfer import transfer as run_

    texts = _specs(metrics)
    overrides = _overrides(setting, transfer)
    with Display() as display:
        rows = run_(runs, to, metrics=texts, progress=lambda done, total: display.step("embedding", done, total), **overrides)
        for row in rows:
            numbers = "  ".join(f"{key} {value:.4f}" for key, value in row.items() if isinstance(value, float))
            display.line(f"{row['run']}: {row['trained_on']} -> {row['tested_on']}: {numbers}")
    _write_json(out, rows)


@app.command()
def shift(
    targets: Annotated[list[str], typer.Argument(help="Run folders, and .npz files of features of a network without training.")],
    splits: Annotated[str, typer.Option(help="The file of splits, where runs do not name it.")] = "",
    dataset: Annotated[str, typer.Option(help="What the features of an .npz file are of.")] = "",
    metrics: Annotated[str, typer.Option(help="Metrics of the runs, separated by semicolons or as a TOML list.")] = "recall(k=1)",
    structure: Annotated[str, typer.Option(help="Metrics of the training embeddings to set against the first one.")] = "",
    setting: Annotated[list[str] | None, typer.Option("--set", help="A setting as `key=value`, such as `device=cuda`.")] = None,
    out: Annotated[Path, typer.Option(help="The JSON file to write; the figure goes beside it.")] = Path("shift.json"),
) -> None:
    """Compare runs over growing shifts: recall against distance, the aggregated score (AGS), and whether structure foretells it.

    Examples:

    - `unimetric shift runs/margin_* runs/ms_* --out shift.json`
    - `unimetric shift resnet50.npz swav.npz --dataset cub200 --splits cub_splits.json`
    - `unimetric shift runs/* --structure "spectral_decay; pi_ratio" --set device=cuda`
    """
    from unimetric.engine.shift import draw_report, shift_report

    _beside(out)
    texts, shapes = _specs(metrics), _specs(structure, "--structure")
    overrides = _overrides(setting, shift)
    report = shift_report(targets, splits=splits, dataset=dataset, metrics=texts, structure=shapes, **overrides)
    _write_json(out, report)
    for name, method in report["methods"].items():
        for metric, scores in method["scores"].items():
            curve = "  ".join(f"{distance:.1f}: {score:.4f}" for distance, score in zip(method["distances"], scores, strict=True))
            area = f"  AGS {method['ags'][metric]:.4f}" if method["ags"] else ""
            print(f"{name}: {metric}: {curve}{area}")
    for name, trend in report["structure"].items():
        print(f"{name} against {texts[0]}: slope {trend['slope']:.3f}, correlation {trend['correlation']:.3f}")
    draw_report(out.with_suffix(".png"), report, texts[0])
    print(f"see {out} and {out.with_suffix('.png')}")


@app.command()
def bench(
    grid: Annotated[Path, typer.Argument(help="A grid: a run's TOML file with lists for some settings.")],
    settings: Settings = None,
    out: Annotated[str, typer.Option(help="Where run folders go; default `runs/<grid>`. With --ray, any place of fsspec.")] = "",
    ray: Annotated[str, typer.Option(help="Run on the Ray cluster at this address; `auto` finds it, `local` starts one.")] = "",
    gpus: Annotated[float, typer.Option(help="With --ray: GPUs per run; 0.5 puts two runs on one.", min=0)] = 0.0,
    cpus: Annotated[float, typer.Option(help="With --ray: cores per run.", min=0)] = 1.0,
    parallel: Annotated[str, typer.Option(help="Number of runs at once on this machine, or `auto`: as many as fit in its memory.")] = "1",
    pictures: Annotated[bool, typer.Option(help="Keep what a report shows of each embedding.")] = True,
    quiet: Annotated[bool, typer.Option(help="Show nothing.")] = False,
) -> None:
    """Run every combination of a grid, or resume an interrupted study.

    Finished runs are skipped. A run that fails is tried twice and does not stop the others.

    Examples:

    - `unimetric bench configs/grids/glyphs_losses.toml`
    - `unimetric bench configs/grids/glyphs_losses.toml --parallel auto`
    - `unimetric bench configs/grids/revisiting_table2_cub200.toml "dataset=pack(path='cub.pack')" --ray auto --gpus 0.5`
    """
    from unimetric.bench.cluster import study_on_ray
    from unimetric.bench.grid import check_runs, read_grid
    from unimetric.bench.parallel import read_parallel
    from unimetric.bench.study import study

    runs = read_grid(grid, **_overrides(settings, bench, axes=True))
    at_once = read_parallel(parallel)
    if not ray and (gpus != 0.0 or cpus != 1.0):
        raise UnimetricError("`--gpus` and `--cpus` are shares of a cluster's machines", "add `--ray auto`, or leave them out")
    if ray and at_once != 1:
        raise UnimetricError(
            f"`--parallel` requires runs on this machine, got `--ray {ray}`", "remove `--parallel`; `--gpus 0.25` puts four runs on one GPU"
        )
    check_runs(runs, str(grid))
    place = out or f"runs/{grid.stem}"
    if ray:
        states = study_on_ray(runs, place, address=ray, gpus=gpus, cpus=cpus, pictures=pictures, quiet=quiet)
    else:
        states = study(runs, place, parallel=at_once, pictures=pictures, quiet=quiet)
    if "failed" in states.values():
        raise typer.Exit(1)


@app.command()
def tune(
    search: Annotated[Path, typer.Argument(help="A run's TOML file with `{names}` in its texts and their ranges in [search].")],
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Where run folders go; default `runs/<name of the search>`.")] = None,
    trials: Annotated[int, typer.Option(help="Runs in all, those of earlier times among them.", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="Of the search.", min=0, max=2**32 - 1)] = 0,
) -> None:
    """Search for the best settings on validation classes, which are taken from the training classes; test classes decide nothing.

    Example: `unimetric tune configs/grids/glyphs_search.toml --trials 20`
    """
    from unimetric.bench.tune import tune as run
    from unimetric.bench.tune import without_validation
    from unimetric.config import load

    folder = out or Path("runs") / search.stem
    value, best = run(search, folder, trials=trials, seed=seed, **_overrides(settings, tune, axes=True))
    print(f"best {value:.4f}: {'  '.join(f'{key} {found}' for key, found in best.items())}")
    split = without_validation(load(folder / "best.toml").split)
    print(f'train on all training classes with: unimetric train {folder / "best.toml"} "split={split}"')


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(help="Run folders, folders of run folders, or places of fsspec.")],
    out: Annotated[Path, typer.Option(help="The page to write; tables go beside it as .md, .csv and .tex.")] = Path("report.html"),
    galleries: Annotated[int, typer.Option(help="Runs whose pictures are shown, best first.", min=0)] = 24,
    look: Annotated[bool, typer.Option("--look", help="Embed the pictures of runs that left none.")] = False,
    own_epochs: Annotated[bool, typer.Option("--own-epochs", help="Each metric at its own best epoch, as Roth et al. 2020.")] = False,
) -> None:
    """Make one page of many runs: tables, curves, shifts, spectra, neighbours, maps. It needs no network to be read.

    Examples:

    - `unimetric report runs/glyphs_losses --out report.html`
    - `unimetric report runs/a runs/b --look`
    """
    from unimetric.bench.storage import local_copies
    from unimetric.report import report as write

    with local_copies(runs) as folders:
        if look:
            from unimetric.engine.look import look_where_missing

            look_where_missing(folders)
        left_out = write(folders, out, galleries=galleries, own_epochs=own_epochs)
    for folder, reason in left_out:
        print(f"left out {folder}: {reason}", file=sys.stderr)
    print(f"see {out}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    backbone: Annotated[str, typer.Option(help="Where the frozen weights lie now, if not where the run says.")] = "",
) -> None:
    """Join what a run trained with the frozen weights it was trained in; LoRA is multiplied into them.

    Example: `unimetric export runs/puma --out puma`
    """
    from unimetric.engine.export import export as run_export

    folder = run_export(run, out, backbone=backbone)
    print(f"{folder}: {(folder / 'model.safetensors').stat().st_size / 2**20:,.1f} MiB; measure it with: unimetric evaluate {folder}")


@app.command()
def ensemble(
    runs: Annotated[list[str], typer.Argument(help="Run folders, and settings as `key=value`.")],
    metrics: Annotated[str, typer.Option(help="Metrics, separated by semicolons or as a TOML list.")] = "unified; harmonic; per_source",
    normalise: Annotated[bool, typer.Option("--normalise", help="Bring the means to length one: neighbours by cosine.")] = False,
    out: Annotated[Path | None, typer.Option(help="A JSON file for the numbers.")] = None,
) -> None:
    """Measure several runs as one, by the mean of their embeddings, on all their datasets.

    Examples:

    - `unimetric ensemble runs/cub runs/cars runs/dogs`
    - `unimetric ensemble runs/cub runs/cars "dataset=union(parts=['cub200', 'cars196'])" device=cuda`
    """
    from unimetric.engine.display import Display
    from unimetric.engine.ensemble import ensemble as run

    overrides = _overrides([word for word in runs if "=" in word], ensemble)
    with Display() as display:
        numbers = run(
            [word for word in runs if "=" not in word],
            metrics=_specs(metrics),
            normalise=normalise,
            progress=lambda done, total: display.step("embedding", done, total),
            **overrides,
        )
        for name, value in numbers.items():
            display.line(f"{name:<32} {value:.4f}")
    _write_json(out, numbers)


@app.command()
def figure(
    kind: Annotated[str, typer.Argument(help="prompts, imbalance or keep.")],
    runs: Annotated[list[Path], typer.Argument(help="Run folders; one, or several for `keep`.")],
    out: Annotated[Path, typer.Option(help="The PNG file.")],
) -> None:
    """Draw a figure of universal metric learning: prompts a dataset prefers, sizes of classes, recall by keep probability.

    Examples:

    - `unimetric figure prompts runs/puma --out prompts.png`
    - `unimetric figure imbalance configs/puma_code.toml --out imbalance.png`
    - `unimetric figure keep runs/keep_0.3 runs/keep_0.5 runs/keep_1.0 --out keep.png`
    """
    from unimetric.engine import figures

    if kind == "keep":
        figures.keep_probability(runs, out)
    elif kind in ("prompts", "imbalance"):
        if len(runs) != 1:
            raise UnimetricError(f"`figure {kind}` is of one run", "name one run folder")
        (figures.prompt_preference if kind == "prompts" else figures.imbalance)(runs[0], out)
    else:
        raise UnimetricError(f"there is no figure `{kind}`", closest(kind, ("prompts", "imbalance", "keep")))
    print(out)


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
