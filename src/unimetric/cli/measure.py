"""Commands that evaluate runs: `evaluate`, `adapt`, `transfer`, `ensemble`, `shift`, `split`, `explain`, `figure`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from unimetric.cli.options import Settings, read_overrides
from unimetric.errors import UnimetricError, closest
from unimetric.files import write_text


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
    from unimetric.analysis.evaluate import evaluate as run
    from unimetric.analysis.evaluate import evaluate_file
    from unimetric.config import from_settings
    from unimetric.metrics import explain as meaning
    from unimetric.runs.display import Display
    from unimetric.spec import names

    texts = _specs(metrics)
    overrides = read_overrides(settings, evaluate)
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
    from unimetric.analysis.explain import explain as run_

    numbers = _numbers_in(prototypes, "--prototypes", int)
    for number, weight in run_(run, pictures, out=out, prototypes=numbers, count=count):
        print(f"prototype {number:<4} mean weight {weight:.4f}")
    print(f"see {out}")


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
    from unimetric.analysis.split import features_of, make_splits, write_splits
    from unimetric.config import from_settings
    from unimetric.runs.display import Display

    _beside(out)
    wanted = _numbers_in(targets, "--targets", float)
    if not all(map(math.isfinite, wanted)):
        raise UnimetricError(f"cannot read `--targets {targets}`", f"write distances with commas: `--targets {_LIKE['--targets']}`")
    chosen = {"dataset": dataset, "backbone": backbone, "precision": "32-true"}
    config = from_settings(chosen | read_overrides(settings, split), "split")
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
    from unimetric.analysis.adapt import adapt as run_
    from unimetric.runs.display import Display

    overrides = read_overrides(settings, adapt)
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
    from unimetric.analysis.transfer import transfer as run_
    from unimetric.runs.display import Display

    texts = _specs(metrics)
    overrides = read_overrides(setting, transfer)
    with Display() as display:
        rows = run_(runs, to, metrics=texts, progress=lambda done, total: display.step("embedding", done, total), **overrides)
        for row in rows:
            numbers = "  ".join(f"{key} {value:.4f}" for key, value in row.items() if isinstance(value, float))
            display.line(f"{row['run']}: {row['trained_on']} -> {row['tested_on']}: {numbers}")
    _write_json(out, rows)


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
    from unimetric.analysis.shift import draw_report, shift_report

    _beside(out)
    texts, shapes = _specs(metrics), _specs(structure, "--structure")
    overrides = read_overrides(setting, shift)
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
    from unimetric.analysis.ensemble import ensemble as run
    from unimetric.runs.display import Display

    overrides = read_overrides([word for word in runs if "=" in word], ensemble)
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


def figure(
    kind: Annotated[str, typer.Argument(help="prompts, imbalance or keep.")],
    runs: Annotated[list[Path], typer.Argument(help="Run folders; one, or several for `keep`.")],
    out: Annotated[Path, typer.Option(help="The PNG file.")],
) -> None:
    """Draw a figure of universal metric learning: prompts a dataset prefers, sizes of classes, recall by keep probability.

    Examples:

    - `unimetric figure prompts runs/puma --out prompts.png`
    - `unimetric figure imbalance puma_code --out imbalance.png`
    - `unimetric figure keep runs/keep_0.3 runs/keep_0.5 runs/keep_1.0 --out keep.png`
    """
    from unimetric.analysis.figures import imbalance, keep, prompts

    if kind == "keep":
        keep.keep_probability(runs, out)
    elif kind in ("prompts", "imbalance"):
        if len(runs) != 1:
            raise UnimetricError(f"`figure {kind}` is of one run", "name one run folder")
        (prompts.prompt_preference if kind == "prompts" else imbalance.imbalance)(runs[0], out)
    else:
        raise UnimetricError(f"there is no figure `{kind}`", closest(kind, ("prompts", "imbalance", "keep")))
    print(out)
