"""Commands that evaluate runs, draw figures, and make splits for an evaluation."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from unimetric.cli.imports import importing
from unimetric.cli.index import evaluate_stored
from unimetric.cli.options import Overrides, Results, Settings, check_outputs, read_numbers, read_overrides, write_json
from unimetric.errors import UnimetricError, closest


def _specs(text: str, option: str = "--metrics") -> list[str]:
    from unimetric.config import split_specs

    return split_specs(text, f"`{option}`")


def _check_json_path(out: Path) -> None:
    if out.suffix == ".png":
        hint = f"use `--out {out.with_suffix('.json')}`; the figure is saved as {out}"
        raise UnimetricError(f"`--out` must not be a .png file, got {out}", hint)
    check_outputs(out)


def evaluate(
    target: Annotated[
        str, typer.Argument(help="Run or index folder, exported file (.onnx), .npz file with `embeddings` and `labels`, or backbone.")
    ],
    settings: Settings = None,
    metrics: Annotated[str, typer.Option(help="Metrics, separated by semicolons or as a TOML list (default: those of the run).")] = "",
    part: Annotated[str, typer.Option(help="Rows to evaluate: test, validation or train.")] = "test",
    rerank: Annotated[bool, typer.Option("--rerank", help="k-reciprocal re-ranking of the neighbors.")] = False,
    level: Annotated[float, typer.Option(help="Level of confidence intervals, such as 0.95; 0 for none.")] = 0.0,
    out: Results = None,
    save: Annotated[Path | None, typer.Option(help=".npz file for embeddings, labels, names, paths and geometry.")] = None,
    explain: Annotated[bool, typer.Option(help="Explanation of each metric.")] = False,
    per_class: Annotated[bool, typer.Option("--per-class", help="Recall@1 of each class: the hardest, and all in the JSON file.")] = False,
    duplicates: Annotated[bool, typer.Option("--duplicates", help="Warning about near-duplicates of queries in training.")] = False,
    group_rule: Annotated[
        str, typer.Option(help="Gallery images of its group that a query does not find: class, group or none (default: of the dataset).")
    ] = "",
    dims: Annotated[str, typer.Option(help="Numbers of first dimensions to evaluate as well, such as 32,64,128.")] = "",
    precisions: Annotated[str, typer.Option(help="Precisions to evaluate as well: float16,int8,binary.")] = "",
    ray: Annotated[str, typer.Option(help="For an index: Ray cluster that searches exactly, in shards; `auto` finds one.")] = "",
    gpus: Annotated[float, typer.Option(help="With --ray: GPUs per worker.", min=0)] = 0.0,
) -> None:
    """Evaluate a run, an index, saved embeddings, or a pretrained network.

    Examples:

    - `unimetric evaluate runs/a --metrics "recall(k=1); map_at_r; nmi" --explain`
    - `unimetric evaluate runs/a --per-class --out classes.json`
    - `unimetric evaluate runs/a --dims 32,64,128 --precisions float16,int8,binary`
    - `unimetric evaluate mine.onnx "dataset=folder(root='images')"`
    - `unimetric evaluate embeddings.npz --metrics "recall(k=1)"`
    - `unimetric evaluate my.index --metrics "recall(k=1); map_at_r"`
    - `unimetric evaluate "timm(name='resnet50.tv_in1k', pretrained=True)" dataset=cub200`
    """
    with importing():
        from unimetric.analysis.evaluate import evaluate as run
        from unimetric.analysis.evaluate import evaluate_file
        from unimetric.config import from_backbone
        from unimetric.deploy.facts import check_index
        from unimetric.runs.display import Display
        from unimetric.runs.exported import format_of

    check_outputs(out)
    texts = _specs(metrics)
    overrides = read_overrides(settings, evaluate)
    if check_index(target):
        others: dict[str, Any] = {"--dims": dims, "--precisions": precisions}
        others |= {"settings": overrides, "--rerank": rerank, "--save": save, "--per-class": per_class, "--duplicates": duplicates}
        others |= {"--part": part != "test", "--group-rule": group_rule, "--explain": explain}
        evaluate_stored(target, texts, level, out, others, ray=ray, gpus=gpus)
        return
    if ray or gpus:
        raise UnimetricError(f"{target}: `--ray` and `--gpus` require an index", "remove them, or build an index with `unimetric index`")
    classes: list[dict[str, Any]] = []
    options: dict[str, Any] = {"metrics": texts, "rerank": rerank, "level": level, "per_class": classes.extend if per_class else None}
    options["group_rule"] = group_rule
    smaller: dict[str, Any] = {
        "dims": read_numbers(dims, "--dims", int, like="32,64,128"),
        "precisions": [word.strip() for word in precisions.split(",") if word.strip()],
    }
    with Display() as display:
        progress = partial(display.step, "embedding")
        if target.endswith(".npz"):
            geometry = str(overrides.pop("geometry", ""))
            if overrides or save is not None or part != "test":
                raise UnimetricError(f"{target}: settings, `--save` and `--part` require a run folder or a backbone", "remove them")
            for option, value in {"--duplicates": duplicates, "--dims": dims, "--precisions": precisions}.items():
                if value:
                    raise UnimetricError(f"{target}: `{option}` requires a run folder or a backbone", "remove it")
            numbers = evaluate_file(target, geometry=geometry, **options)
        elif Path(target).is_dir() or format_of(target):
            more: dict[str, Any] = {"duplicates": duplicates, "note": display.line, **smaller}
            numbers = run(target, part=part, save=save, progress=progress, **more, **options, **overrides)
        else:
            config = from_backbone(target, overrides, "evaluate", "run folder, .npz file")
            if "dataset" not in overrides:
                display.line(f"no dataset is given, so it is `{config.dataset}`")
            numbers = run(config, part=part, save=save, duplicates=duplicates, progress=progress, **smaller, **options)
        for line in _result_lines(numbers, classes, explain=explain):
            display.line(line)
    write_json(out, numbers | ({"classes": classes} if per_class else {}))


#: Number of classes that `--per-class` prints.
_HARDEST = 20


def _result_lines(numbers: dict[str, float], classes: list[dict[str, Any]], *, explain: bool = False) -> list[str]:
    """Return metric values, one per line, and tables of single datasets and hard classes."""
    from unimetric.metrics import explain as meaning
    from unimetric.runs.display import source_table

    others, table = source_table(numbers)
    lines = [f"{name:<32} {value:.4f}" + (f"   {meaning(name.partition('/')[0])}" if explain else "") for name, value in others.items()]
    lines += table
    if not classes:
        return lines
    some = classes[:_HARDEST]
    width = max(len("hardest classes"), *(len(row["class"]) for row in some))
    lines.append(f"{'hardest classes':<{width}}  recall@1  queries  most found instead")
    lines += [f"{row['class']:<{width}}  {row['recall']:>8.4f}  {row['queries']:>7,}  {row['confused_with']}" for row in some]
    if len(classes) > _HARDEST:
        lines.append(f"{len(classes) - _HARDEST:,} more classes: use `--out FILE.json` for all")
    return lines


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

    numbers = read_numbers(prototypes, "--prototypes", int, like="0,5,9")
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
    targets: Annotated[
        str, typer.Option(help="Multiples of the default split's distance to select instead, or those of the paper: cub200, cars196, sop.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of the random halves that define no shift.", min=0)] = 0,
) -> None:
    """Make train-test splits of increasing Frechet distance (ooDML).

    Examples:

    - `unimetric split cub200 --features cub.npz --out cub_splits.json device=cuda`
    - `unimetric split cub200 --features cub.npz --out cub_splits.json --targets cub200`
    - `unimetric split cub200 --features cub.npz --out cub_splits.json --targets 0.5,1,2,3`
    - `unimetric split glyphs --backbone small --out splits.json transform=glyphs`
    """
    from unimetric.analysis.split import check_classes, features_of, make_splits, write_splits
    from unimetric.analysis.swapping import PAPER_TARGETS
    from unimetric.config import from_settings
    from unimetric.runs.display import Display
    from unimetric.spec import create

    _check_json_path(out)
    check_outputs(None if features is None or features.exists() else features)  # an existing file is only read
    wanted = PAPER_TARGETS[targets] if targets in PAPER_TARGETS else read_numbers(targets, "--targets", float, like="0.5,1,2,3")
    if not all(math.isfinite(target) and target > 0 for target in wanted):
        raise UnimetricError(f"`--targets` must be positive and finite, got `{targets}`", "use `--targets 0.5,1,2,3`")
    chosen = {"dataset": dataset, "backbone": backbone, "precision": "32-true"}
    config = from_settings(chosen | read_overrides(settings, split), "split")
    check_classes(create("datasets", config.dataset))  # before the features are computed, which may take long
    with Display() as display:
        table, found = features_of(config, path=features, progress=partial(display.step, "features"))
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
            progress=partial(display.step, "splits"),
        )
        made = str(features) if features is not None else config.backbone
        write_splits(out, splits, {"dataset": config.dataset, "features": made, "transform": config.transform})
        for number, entry in splits["splits"].items():
            display.line(f"split {number}: {entry['key']:>5}  distance {entry['distance']:8.4g}  (target {entry['target']:.4g})")
        display.line(f"{len(splits['history'])} splits; without shift: {splits['no_shift']:.4g}; no harder split after {splits['plateau']}")
        display.line(f"train on one with: unimetric train CONFIG \"split=ood(path='{out}', split=1)\"; see {out.with_suffix('.png')}")


def adapt(
    run: Annotated[Path, typer.Argument(help="Run folder, or the folder of a study.")],
    settings: Settings = None,
    shots: Annotated[list[int] | None, typer.Option(help="Training images per test class (default: 5). May be repeated.", min=1)] = None,
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
    - `unimetric adapt runs/oodml_figure7_cub200 --shots 2 --shots 5 device=cuda`
    """
    from unimetric.analysis.adapt import adapt as run_
    from unimetric.runs.display import Display
    from unimetric.runs.folder import study_runs

    arguments: dict[str, Any] = {"episodes": episodes, "draw": draw, "iterations": iterations, "looks": crops, "epoch": epoch}
    arguments |= {"with_replacement": with_replacement, "seed": seed} | read_overrides(settings, adapt)
    wanted = list(dict.fromkeys(shots or [5]))
    with Display() as display:
        if runs := study_runs(run):
            _adapt_study(display, run, runs, wanted, arguments)
            return
        for count in wanted:
            result = run_(run, shots=count, progress=partial(display.step, "adapting"), **arguments)
            for name, (mean, half) in result["summary"].items():
                display.line(f"{name:<44} {mean:.4f} +- {half:.4f}")
            display.line(f"{len(result['episodes'])} episodes; see {run / f'adapt_{count}_shots.json'}")


def _adapt_study(display: Any, folder: Path, runs: list[Path], shots: list[int], arguments: dict[str, Any]) -> None:
    """Adapt every run of a study, and write its table and figures into the study folder."""
    from unimetric.analysis.adapt import METRICS
    from unimetric.analysis.few_shot import adapt_study, draw_few_shot

    report = adapt_study(runs, shots=shots, progress=partial(display.step, "adapting runs"), **arguments)
    write_json(folder / "few_shot.json", report)
    for count, methods in report.items():
        draw_few_shot(folder / f"few_shot_{count}.png", methods, METRICS[0])
        for name, method in methods.items():
            gain = method["scores"][f"gain/{METRICS[0]}"]
            display.line(f"{count} shots, {name}: gain of {METRICS[0]} {100 * sum(gain) / len(gain):+.1f} points, {len(gain)} splits")
    display.line(f"{len(runs)} runs; see {folder / 'few_shot.json'} and {folder / f'few_shot_{shots[0]}.png'}")


def transfer(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of studies.")],
    to: Annotated[list[str], typer.Option(help="Dataset to test on. May be repeated.")],
    metrics: Annotated[str, typer.Option(help="Metrics, separated by semicolons or as a TOML list (default: those of each run).")] = "",
    setting: Overrides = None,
    out: Results = None,
) -> None:
    """Evaluate runs on datasets that they were not trained on.

    Examples:

    - `unimetric transfer runs/cub runs/cars --to cub200 --to cars196`
    - `unimetric transfer runs/cub --to "pack(path='cars.pack')" --set device=cuda --out transfer.json`
    """
    from unimetric.analysis.transfer import transfer as run_
    from unimetric.runs.display import Display

    check_outputs(out)
    texts = _specs(metrics)
    overrides = read_overrides(setting, transfer)
    with Display() as display:
        rows = run_(runs, to, metrics=texts, progress=partial(display.step, "embedding"), **overrides)
        for row in rows:
            numbers = "  ".join(f"{key} {value:.4f}" for key, value in row.items() if isinstance(value, float))
            display.line(f"{row['run']}: {row['trained_on']} -> {row['tested_on']}: {numbers}")
    write_json(out, rows)


def shift(
    targets: Annotated[list[str], typer.Argument(help="Run folders, folders of studies, and .npz files of pretrained features.")],
    splits: Annotated[str, typer.Option(help="File of splits, if the runs do not name one.")] = "",
    dataset: Annotated[str, typer.Option(help="Dataset of the features of an .npz file.")] = "",
    metrics: Annotated[str, typer.Option(help="Metrics of the runs, separated by semicolons or as a TOML list.")] = "recall(k=1)",
    structure: Annotated[str, typer.Option(help="Metrics of the training embeddings to correlate with the first one.")] = "",
    setting: Overrides = None,
    out: Annotated[Path, typer.Option(help="JSON file; the figure is saved next to it.")] = Path("shift.json"),
) -> None:
    """Compare runs over increasing shifts, and compute their AGS.

    Examples:

    - `unimetric shift runs/margin_* runs/ms_* --out shift.json`
    - `unimetric shift resnet50.npz swav.npz --dataset cub200 --splits cub_splits.json`
    - `unimetric shift runs/oodml_figure2_cub200 --structure "spectral_decay; pi_ratio" --set device=cuda`
    """
    from unimetric.analysis.shift import draw_report, shift_report

    _check_json_path(out)
    texts, shapes = _specs(metrics), _specs(structure, "--structure")
    overrides = read_overrides(setting, shift)
    report = shift_report(targets, splits=splits, dataset=dataset, metrics=texts, structure=shapes, **overrides)
    write_json(out, report)
    for name, method in report["methods"].items():
        for metric, scores in method["scores"].items():
            curve = "  ".join(f"{distance:.4g}: {score:.4f}" for distance, score in zip(method["distances"], scores, strict=True))
            area = f"  AGS {method['ags'][metric]:.4f}" if method["ags"] else ""
            if spread := method["ags_spread"][metric]:
                area += f" ({spread['low']:.4f} to {spread['high']:.4f}, {spread['seeds']} seeds)"
            print(f"{name}: {metric}: {curve}{area}")
    for name, trend in report["structure"].items():
        print(f"{name} against {texts[0]}: slope {trend['slope']:.3f}, correlation {trend['correlation']:.3f}")
    draw_report(out.with_suffix(".png"), report, texts[0])
    print(f"see {out} and {out.with_suffix('.png')}")


def ensemble(
    runs: Annotated[list[str], typer.Argument(help="Run folders, the folder of a study, and settings as `key=value`.")],
    label: Annotated[
        list[str] | None, typer.Option(help="Label of the runs of a study as `axis=label`. May be repeated, also for one axis.")
    ] = None,
    metrics: Annotated[str, typer.Option(help="Metrics, separated by semicolons or as a TOML list.")] = "unified; harmonic; per_source",
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Mean embeddings scaled to unit length: cosine instead of Euclidean neighbors.")
    ] = False,
    out: Results = None,
) -> None:
    """Evaluate the mean embedding of several runs on all their datasets.

    Examples:

    - `unimetric ensemble runs/cub runs/cars runs/dogs`
    - `unimetric ensemble runs/cub runs/cars "dataset=union(parts=['cub200', 'cars196'])" device=cuda`
    - `unimetric ensemble runs/puma_table2_specific --label method=PA device=cuda`
    """
    from unimetric.analysis.ensemble import ensemble as run
    from unimetric.analysis.ensemble import select_runs
    from unimetric.runs.display import Display

    check_outputs(out)
    folders = [word for word in runs if "=" not in word or Path(word).is_dir()]
    overrides = read_overrides([word for word in runs if word not in folders], ensemble)
    places = select_runs(folders, _read_labels(label or []))
    with Display() as display:
        numbers = run(places, metrics=_specs(metrics), normalise=normalize, progress=partial(display.step, "embedding"), **overrides)
        for line in _result_lines(numbers, []):
            display.line(line)
    write_json(out, numbers)


def _read_labels(words: list[str]) -> dict[str, list[str]]:
    """Read `axis=label` words: all labels by axis."""
    found: dict[str, list[str]] = {}
    for word in words:
        axis, equals, value = word.partition("=")
        if not equals or not axis or not value:
            raise UnimetricError(f"`--label` must be `axis=label`, got `{word}`", "write `--label method=PA`")
        found.setdefault(axis, []).append(value)
    return found


#: Options of each figure.
_FIGURES = {
    "aggregate": ("--by", "--metrics"),
    "bias": ("--splits", "--dataset"),
    "classes": ("--splits", "--dataset"),
    "components": ("--metrics",),
    "correlation": ("--metrics",),
    "domains": ("--dataset", "--set"),
    "embedding": ("--set",),
    "imbalance": (),
    "keep": ("--metrics",),
    "parameters": ("--metrics",),
    "prompts": (),
    "shots": ("--metrics",),
    "toy": ("--seeds",),
}

#: Figures of one run or file.
_OF_ONE = ("classes", "embedding", "imbalance", "prompts")


def figure(
    kind: Annotated[str, typer.Argument(help=f"Figure: {', '.join(_FIGURES)}.")],
    out: Annotated[Path, typer.Option(help="Output PNG file.")],
    targets: Annotated[list[str] | None, typer.Argument(help="Run folders, folder of a study, or files. None for `toy`.")] = None,
    by: Annotated[str, typer.Option(help="Axis of the study for `aggregate`, such as sampler.")] = "",
    metrics: Annotated[str, typer.Option(help="Metrics of the runs, separated by semicolons or as a TOML list.")] = "",
    splits: Annotated[str, typer.Option(help="File of splits for features.")] = "",
    dataset: Annotated[list[str] | None, typer.Option(help="Dataset of features. Repeated for `domains`.")] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds of `toy` (default: 5).", min=0)] = 0,
    setting: Overrides = None,
) -> None:
    """Draw a figure of the papers from runs, features or points.

    Examples:

    - `unimetric figure toy --out toy.png`
    - `unimetric figure aggregate runs/revisiting_table7_cub200 --by sampler --out samplers.png`
    - `unimetric figure correlation runs/revisiting_table2_cub200 --out metrics.png`
    - `unimetric figure bias resnet50.npz swav.npz --splits splits.json --dataset cub200 --out bias.png`
    - `unimetric figure classes resnet50.npz --splits splits.json --dataset cub200 --out classes.png`
    - `unimetric figure domains cub.npz cars.npz runs/* --dataset cub200 --dataset cars196 --out domains.png`
    - `unimetric figure prompts runs/puma --out prompts.png`
    - `unimetric figure imbalance puma_code --out imbalance.png`
    - `unimetric figure keep runs/keep_0.3 runs/keep_0.5 runs/keep_1.0 --out keep.png`
    - `unimetric figure embedding runs/puma --out map.png`
    """
    if kind not in _FIGURES:
        raise UnimetricError(f"unknown figure `{kind}`", closest(kind, _FIGURES))
    options: dict[str, Any] = {
        "--by": by,
        "--metrics": metrics,
        "--splits": splits,
        "--dataset": dataset,
        "--seeds": seeds,
        "--set": setting,
    }
    for option, value in options.items():
        if value and option not in _FIGURES[kind]:
            raise UnimetricError(f"`figure {kind}` has no option `{option}`", "remove the option")
    named = targets or []
    if kind in _OF_ONE and len(named) != 1:
        raise UnimetricError(f"`figure {kind}` requires one run folder or file, got {len(named)}", "name one")
    if bool(named) == (kind == "toy"):
        problem = f"`figure {kind}` has no run folders" if named else f"`figure {kind}` requires run folders or files"
        raise UnimetricError(problem, "remove them" if named else "name them after the figure")
    check_outputs(out)
    options |= {"--metrics": _specs(metrics), "--dataset": dataset or [], "--set": read_overrides(setting, figure)}
    _draw_figure(kind, named, out, options)
    print(out)


def _draw_figure(kind: str, targets: list[str], out: Path, options: dict[str, Any]) -> None:
    """Draw a figure with the options that were given."""
    from unimetric.analysis.figures import (
        aggregate,
        bias,
        classes,
        components,
        correlation,
        domains,
        embedding,
        imbalance,
        keep,
        parameters,
        prompts,
        shots,
    )

    metrics, splits, datasets, overrides = (options[name] for name in ("--metrics", "--splits", "--dataset", "--set"))
    if kind in ("bias", "classes") and len(datasets) > 1:
        raise UnimetricError(f"`figure {kind}` requires one dataset, got {len(datasets)}", "name one with `--dataset`")
    dataset = next(iter(datasets), "")
    if kind == "toy":
        _draw_toy(out, options["--seeds"] or 5)
    elif kind == "aggregate":
        aggregate.aggregate(targets, out, by=options["--by"], metrics=metrics)
    elif kind == "correlation":
        correlation.metric_correlation(targets, out, metrics=metrics)
    elif kind == "bias":
        bias.network_bias(targets, out, splits=splits, dataset=dataset)
    elif kind == "classes":
        if not splits or not dataset:
            raise UnimetricError("`figure classes` requires splits and a dataset", "use `--splits FILE` and `--dataset`")
        projection, _ = classes.class_maps(targets[0], out, splits=splits, dataset=dataset)
        print(f"projection: {projection}")
    elif kind == "domains":
        found = domains.domain_shift(targets, out, datasets=datasets, **overrides)
        for name, row in zip(datasets, found["distances"], strict=True):
            print(f"{name} to {', '.join(f'{to}: {value:.4g}' for to, value in zip(datasets, row, strict=True))}")
    elif kind == "embedding":
        embedding.embedding_map(targets[0], out, **overrides)
    elif kind in ("prompts", "imbalance"):
        (prompts.prompt_preference if kind == "prompts" else imbalance.imbalance)(targets[0], out)
    elif kind == "parameters":
        for name, (size, score) in parameters.trained_parameters(targets, out, metric=next(iter(metrics), "")).items():
            print(f"{name}: {size:,.0f} trained parameters, {score:.4f}")
    else:
        curves = {"components": components.component_sizes, "keep": keep.keep_probability, "shots": shots.few_shot_curves}
        curves[kind](targets, out, metrics=metrics)


def _draw_toy(out: Path, seeds: int) -> None:
    from unimetric.analysis.figures.toy import toy
    from unimetric.runs.display import Display

    with Display() as display:
        found = toy(out, seeds=seeds, progress=partial(display.step, "networks"))
        for task, variants in found.items():
            for variant, scores in variants.items():
                means = "  ".join(f"{name} {sum(values) / len(values):.3f}" for name, values in scores.items())
                display.line(f"{task}, {variant}: {means}")
