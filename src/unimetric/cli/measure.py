"""Commands that evaluate runs, draw figures, and make splits for an evaluation."""

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
        raise UnimetricError(f"`{option}` must be numbers separated by commas, got `{words}`", f"use `{option} {_LIKE[option]}`") from None


_LIKE = {"--prototypes": "0,5,9", "--targets": "10,50,90"}


def _check_json_path(out: Path) -> None:
    if out.suffix == ".png":
        hint = f"use `--out {out.with_suffix('.json')}`; the figure is saved as {out}"
        raise UnimetricError(f"`--out` must not be a .png file, got {out}", hint)


def _write_json(out: Path | None, found: Any) -> None:
    if out is not None:
        write_text(out, json.dumps(found, indent=1))


def evaluate(
    target: Annotated[str, typer.Argument(help="Run folder, .npz file with `embeddings` and `labels`, or backbone spec string.")],
    settings: Settings = None,
    metrics: Annotated[str, typer.Option(help="Metrics, separated by semicolons or as a TOML list (default: those of the run).")] = "",
    part: Annotated[str, typer.Option(help="Rows to evaluate: test, validation or train.")] = "test",
    rerank: Annotated[bool, typer.Option("--rerank", help="k-reciprocal re-ranking of the neighbors.")] = False,
    level: Annotated[float, typer.Option(help="Level of confidence intervals, such as 0.95; 0 for none.")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
    save: Annotated[Path | None, typer.Option(help=".npz file for embeddings and labels.")] = None,
    explain: Annotated[bool, typer.Option(help="Explanation of each metric.")] = False,
) -> None:
    """Evaluate a run, saved embeddings, or a pretrained network.

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
                raise UnimetricError(f"{target}: settings, `--save` and `--part` require a run folder or a backbone", "remove them")
            numbers = evaluate_file(target, metrics=texts, rerank=rerank, level=level, geometry=geometry)
        elif Path(target).is_dir():
            numbers = run(target, metrics=texts, part=part, rerank=rerank, level=level, save=save, progress=progress, **overrides)
        else:
            name = target.partition("(")[0]
            if ("." not in name and name not in names("backbones")) or "/" in name:
                raise UnimetricError(f"{target}: not a run folder, .npz file or backbone", closest(name, names("backbones")))
            config = from_settings({"backbone": target, "head": "identity"} | overrides, "evaluate")
            numbers = run(config, metrics=texts, part=part, rerank=rerank, level=level, save=save, progress=progress)
        for name, value in numbers.items():
            display.line(f"{name:<32} {value:.4f}" + (f"   {meaning(name.partition('/')[0])}" if explain else ""))
    _write_json(out, numbers)


def explain_(
    run: Annotated[Path, typer.Argument(help="Run folder whose head has prototypes, such as `crt`.")],
    images: Annotated[list[str], typer.Argument(help="Image files, or rows of a pack as `FILE.pack::ROW`.", metavar="IMAGE...")],
    out: Annotated[Path, typer.Option(help="Output PNG file.")] = Path("explain.png"),
    prototypes: Annotated[str, typer.Option(help="Prototype indices, separated by commas (default: the most active).")] = "",
    count: Annotated[int, typer.Option(help="Number of the most active prototypes.", min=1)] = 8,
) -> None:
    """Draw the image regions that activate each prototype.

    Examples:

    - `unimetric explain runs/crt bird.jpg other.jpg --out prototypes.png`
    - `unimetric explain runs/crt cub.pack::17 --prototypes 0,5,9`
    """
    from unimetric.analysis.explain import explain as run_

    numbers = _numbers_in(prototypes, "--prototypes", int)
    for number, weight in run_(run, images, out=out, prototypes=numbers, count=count):
        print(f"prototype {number:<4} mean weight {weight:.4f}")
    print(f"see {out}")


def split(
    dataset: Annotated[str, typer.Argument(help="Dataset spec string, such as `cub200` or `pack(path='cub.pack')`.")],
    out: Annotated[Path, typer.Option(help="JSON file; a figure of the progression is saved next to it.")],
    settings: Settings = None,
    backbone: Annotated[str, typer.Option(help="Backbone spec string of the features.")] = "timm(name='resnet50.tv_in1k', pretrained=True)",
    features: Annotated[Path | None, typer.Option(help=".npz file with the features of all rows. Written if missing.")] = None,
    swaps: Annotated[int, typer.Option(help="Classes swapped per step; 1000 for SOP.", min=1)] = 2,
    count: Annotated[int, typer.Option(help="Number of splits by swapping, including the first.", min=1)] = 25,
    easier: Annotated[int, typer.Option(help="Number of easier splits; 1 for none.", min=1)] = 15,
    removal: Annotated[bool, typer.Option(help="Further splits by removing classes.")] = True,
    code_removal: Annotated[bool, typer.Option("--code-removal", help="Removal order of the authors' script.")] = False,
    plateau: Annotated[bool, typer.Option("--plateau", help="End of swapping when the distance stops rising.")] = False,
    choose: Annotated[int, typer.Option(help="Number of splits to select, evenly over the distances.", min=1)] = 9,
    targets: Annotated[str, typer.Option(help="Distances to approximate instead, separated by commas.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the random halves that define no shift.", min=0)] = 0,
) -> None:
    """Make train-test splits of increasing Frechet distance (ooDML).

    Examples:

    - `unimetric split cub200 --features cub.npz --out cub_splits.json device=cuda`
    - `unimetric split cub200 --features cub.npz --out cub_splits.json --targets 19.2,28.5,52.6,72.2,92.5,120.4,136.5,152,173.9`
    - `unimetric split glyphs --backbone small --out splits.json transform=glyphs`
    """
    from unimetric.analysis.split import features_of, make_splits, write_splits
    from unimetric.config import from_settings
    from unimetric.runs.display import Display

    _check_json_path(out)
    wanted = _numbers_in(targets, "--targets", float)
    if not all(map(math.isfinite, wanted)):
        raise UnimetricError(f"`--targets` must be finite distances, got `{targets}`", f"use `--targets {_LIKE['--targets']}`")
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
            display.line(f"split {number}: {entry['key']:>5}  distance {entry['distance']:8.4g}  (target {entry['target']:.4g})")
        display.line(f"{len(splits['history'])} splits; without shift: {splits['no_shift']:.4g}; no harder split after {splits['plateau']}")
        display.line(f"train on one with: unimetric train CONFIG \"split=ood(path='{out}', split=1)\"; see {out.with_suffix('.png')}")


def adapt(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    settings: Settings = None,
    shots: Annotated[int, typer.Option(help="Training images per test class.", min=1)] = 5,
    episodes: Annotated[int, typer.Option(help="Number of episodes, if drawn at random.", min=2)] = 10,
    draw: Annotated[str, typer.Option(help="Episodes: published, random, or auto (published if available).")] = "auto",
    iterations: Annotated[int, typer.Option(help="Steps per episode; 0 for 1000 (2 shots) or 1500.", min=0)] = 0,
    crops: Annotated[int, typer.Option(help="Random crops per image; 0 uses the center crop.", min=0)] = 16,
    epoch: Annotated[str, typer.Option(help="Epoch of the weights: last or best.")] = "last",
    with_replacement: Annotated[bool, typer.Option(help="Support batches drawn with replacement.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of episodes, crops and batches.", min=0, max=2**32 - 1)] = 0,
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
            looks=crops,
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
    to: Annotated[list[str], typer.Option(help="Dataset to test on. May be repeated.")],
    metrics: Annotated[str, typer.Option(help="Metrics, separated by semicolons or as a TOML list (default: those of each run).")] = "",
    setting: Annotated[list[str] | None, typer.Option("--set", help="Setting as `key=value`, such as `device=cuda`.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> None:
    """Evaluate runs on datasets that they were not trained on.

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
    targets: Annotated[list[str], typer.Argument(help="Run folders, and .npz files with features of pretrained networks.")],
    splits: Annotated[str, typer.Option(help="File of splits, if the runs do not name one.")] = "",
    dataset: Annotated[str, typer.Option(help="Dataset of the features of an .npz file.")] = "",
    metrics: Annotated[str, typer.Option(help="Metrics of the runs, separated by semicolons or as a TOML list.")] = "recall(k=1)",
    structure: Annotated[str, typer.Option(help="Metrics of the training embeddings to correlate with the first one.")] = "",
    setting: Annotated[list[str] | None, typer.Option("--set", help="Setting as `key=value`, such as `device=cuda`.")] = None,
    out: Annotated[Path, typer.Option(help="JSON file; the figure is saved next to it.")] = Path("shift.json"),
) -> None:
    """Compare runs over increasing shifts, and compute their AGS.

    Examples:

    - `unimetric shift runs/margin_* runs/ms_* --out shift.json`
    - `unimetric shift resnet50.npz swav.npz --dataset cub200 --splits cub_splits.json`
    - `unimetric shift runs/* --structure "spectral_decay; pi_ratio" --set device=cuda`
    """
    from unimetric.analysis.shift import draw_report, shift_report

    _check_json_path(out)
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
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Mean embeddings scaled to unit length: cosine instead of Euclidean neighbors.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> None:
    """Evaluate the mean embedding of several runs on all their datasets.

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
            normalise=normalize,
            progress=lambda done, total: display.step("embedding", done, total),
            **overrides,
        )
        for name, value in numbers.items():
            display.line(f"{name:<32} {value:.4f}")
    _write_json(out, numbers)


def figure(
    kind: Annotated[str, typer.Argument(help="Figure: prompts, imbalance or keep.")],
    runs: Annotated[list[Path], typer.Argument(help="Run folder; several for `keep`.")],
    out: Annotated[Path, typer.Option(help="Output PNG file.")],
) -> None:
    """Draw prompts, class sizes, or recall by keep probability.

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
            raise UnimetricError(f"`figure {kind}` requires one run folder, got {len(runs)}", "name one run folder")
        (prompts.prompt_preference if kind == "prompts" else imbalance.imbalance)(runs[0], out)
    else:
        raise UnimetricError(f"unknown figure `{kind}`", closest(kind, ("prompts", "imbalance", "keep")))
    print(out)
