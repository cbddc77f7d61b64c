"""Ensembles: the mean embedding of several runs, as a baseline for one universal model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from unimetric.analysis.evaluate import check_metrics, numbers_of
from unimetric.analysis.figures._runs import read_labels
from unimetric.config import RunConfig
from unimetric.errors import UnimetricError, closest
from unimetric.geometry import poincare_mean
from unimetric.images.loading import Progress
from unimetric.images.table import Table
from unimetric.kinds import Loss
from unimetric.runs.device import open_fabric
from unimetric.runs.embed import embed_all, space_of_points
from unimetric.runs.folder import open_run, overridden
from unimetric.runs.model import loss_with_geometry, place
from unimetric.runs.rows import make_split, readable
from unimetric.spec import create


def ensemble(
    runs: Sequence[str | Path],
    *,
    metrics: Sequence[str] = ("unified", "harmonic", "per_source"),
    part: str = "test",
    normalise: bool = False,
    progress: Progress | None = None,
    **overrides: Any,
) -> dict[str, float]:
    """Evaluate the mean embedding of several runs on the union of their datasets.

        f = 1/M sum_m f_m / |f_m|,   neighbors by <f, f'>

    The inner product is that of the authors' code. An image on which the runs agree has a longer f, and so is nearer to all others. Every
    run embeds every image, because the dataset of a test image is unknown.

    The setting `geometry`, of the runs or among the overrides, replaces the inner product. Runs with a
    hyperbolic loss of one curvature have the mean of the Poincaré ball (`poincare_mean`), and neighbors by
    the distance there. With `geometry="cosine"` or `"euclidean"`, they have the mean above.

    Differs from the paper:
        Its code compares the means of the Poincaré ball by the inner product (`geometry="inner"`), not by
        the distance.

    Reference:
        Universal metric learning with parameter-efficient transfer learning (Kim et al., arXiv 2023), table 2 a.

    Args:
        runs: Run folders, with embeddings of one dimension.
        metrics: Metric spec strings.
        part: Rows of the split: `test`, `validation` or `train`.
        normalise: Whether the means are scaled to unit length. The authors do not scale them.
        progress: Callback with (done, all).
        overrides: Settings that may differ from training. `dataset` defaults to the union of the runs' datasets.

    Returns:
        Metric values by spec string.
    """
    if not runs:
        raise UnimetricError("an ensemble requires at least one run", "name run folders")
    if not metrics:
        raise UnimetricError("an ensemble requires at least one metric", "use `--metrics unified`")
    check_metrics(metrics)
    opened = [open_run(run, overrides) for run in runs]
    wanted = list(dict.fromkeys(config.dataset for config, _ in opened))
    dataset = wanted[0] if len(wanted) == 1 else f"union(parts={wanted!r})"
    dims = {model.dim for _, model in opened}
    if len(dims) > 1:
        raise UnimetricError(
            f"the embeddings of the runs must have one dimension, got {' and '.join(map(str, sorted(dims)))}", "name runs of one dimension"
        )
    configs = [overridden(own, {"dataset": dataset}, run) for run, (own, _) in zip(runs, opened, strict=True)]
    geometry = _geometry(runs, configs)
    losses = [loss_with_geometry(config, model.dim) for config, (_, model) in zip(configs, opened, strict=True)]
    table: Table = create("datasets", configs[0].dataset)  # the same for all runs; splits may differ
    table, rows = _assigned_rows(runs, configs, table, part)
    images = table.take(rows)
    parts: list[Tensor] = []
    for number, (config, (_, model)) in enumerate(zip(configs, opened, strict=True)):
        fabric = open_fabric(config)

        def report(done: int, all_: int, number: int = number) -> None:
            if progress is not None:
                progress(number * all_ + done, len(opened) * all_)

        parts.append(embed_all(fabric, config, model, images, progress=report))
    points, options = _mean(parts, losses, geometry, normalise)
    return numbers_of(space_of_points(points, table, rows, **options), list(metrics))


def select_runs(places: Sequence[str | Path], labels: Mapping[str, Sequence[str]]) -> list[Path]:
    """Return run folders, where the folder of a study stands for its runs with some labels.

    Args:
        places: Run folders, and folders of studies.
        labels: Accepted labels by axis of the study, such as `{"method": ["PA"]}`. Axes without an entry accept all.

    Raises:
        UnimetricError: No run of a study has the labels, or one that has them is not finished.
    """
    found: list[Path] = []
    for folder in map(Path, places):
        if not (folder / "study.json").is_file():
            if labels:
                raise UnimetricError(f"{folder}: labels select runs of a study, and this is not its folder", "name the folder of a study")
            found.append(folder)
            continue
        known = read_labels(folder / "study.json")
        for axis in labels:
            axes = sorted({name for own in known.values() for name in own})
            if axis not in axes:
                raise UnimetricError(f"{folder}: the study has no axis `{axis}`", closest(axis, axes))
        chosen = [folder / run_id for run_id, own in known.items() if all(own.get(axis) in some for axis, some in labels.items())]
        if not chosen:
            wanted = " and ".join(f"{axis} {' or '.join(some)}" for axis, some in labels.items())
            values = {own[axis] for own in known.values() for axis in labels if axis in own}
            raise UnimetricError(f"{folder}: no run of the study has {wanted}", f"the labels are {', '.join(sorted(values))}")
        unfinished = [run for run in chosen if not (run / "done").is_file()]
        if unfinished:
            raise UnimetricError(
                f"{folder}: {len(unfinished)} of {len(chosen)} runs with these labels are not finished, the first is {unfinished[0].name}",
                "finish the study with `unimetric bench`",
            )
        found += chosen
    return found


def _mean(
    parts: Sequence[Tensor], losses: Sequence[Loss | None], geometry: str, normalise: bool
) -> tuple[Float[Tensor, "N D"], dict[str, Any]]:
    """Return the mean of the runs' embeddings, and the options of the `Space` it is in."""
    placed = [place(part, loss, "") for part, loss in zip(parts, losses, strict=True)]
    options = placed[0][1]
    if options["geometry"] == "poincare" and geometry in ("", "poincare", "inner") and all(own == options for _, own in placed):
        return poincare_mean([points for points, _ in placed], curvature=options["curvature"]), options | {
            "geometry": geometry or "poincare"
        }
    mean = sum(functional.normalize(part, dim=1, eps=1e-6) / len(parts) for part in parts)
    assert isinstance(mean, Tensor)
    if geometry and normalise:
        mean = functional.normalize(mean, dim=1, eps=1e-6)
    return place(mean, None, geometry or ("cosine" if normalise else "inner"))


def _geometry(runs: Sequence[str | Path], configs: Sequence[RunConfig]) -> str:
    """Return the `geometry` that all runs share."""
    first = configs[0].geometry
    for run, config in zip(runs, configs, strict=True):
        if config.geometry != first:
            raise UnimetricError(
                f"{run}: `geometry` must be {first!r} as in {runs[0]}, got {config.geometry!r}",
                "set one for all of them, such as `geometry=cosine`",
            )
    return first


def _assigned_rows(runs: Sequence[str | Path], configs: Sequence[RunConfig], table: Table, part: str) -> tuple[Table, np.ndarray]:
    """Return the rows of the evaluation, which must be the same for every run.

    Each split is made and its images are read once.

    Returns:
        The table with the queries and the gallery of the first run's split, and the rows.
    """
    found: dict[tuple[str, int, str], np.ndarray] = {}
    assigned, first = table, None
    for run, config in zip(runs, configs, strict=True):
        key = (config.split, config.seed, config.on_bad_picture)
        if key not in found:
            split = make_split(config, table)
            assigned = assigned if found else split.assign(table)
            kept, _ = readable(config, table, getattr(split, part, np.zeros(0, np.int64)))
            found[key] = np.unique(kept) if part == "train" else kept  # a sampled split may repeat rows
        rows = found[key]
        if not len(rows):
            raise UnimetricError(f"the split has no `{part}` rows", "use test or train")
        first = rows if first is None else first
        if not np.array_equal(rows, first):
            raise UnimetricError(
                f"{run}: its {len(rows):,} `{part}` images (`split = {config.split!r}`, `seed = {config.seed}`) are not "
                f"the {len(first):,} of {runs[0]} (`split = {configs[0].split!r}`, `seed = {configs[0].seed}`)",
                "name runs of one split, or add a setting for all runs, such as `split=standard` or `on_bad_picture=skip`",
            )
    assert first is not None
    return assigned, first
