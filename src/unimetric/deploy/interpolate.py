"""Weights between the start and the end of a run, and the average of several runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unimetric.config import RunConfig, load, score
from unimetric.errors import UnimetricError
from unimetric.files import check_writable, write_json, write_text
from unimetric.images.loading import Progress, View
from unimetric.metrics import measure
from unimetric.runs.device import evaluation_batch, open_fabric, set_up
from unimetric.runs.embed import embed, open_images, space_of
from unimetric.runs.folder import check_own_images, load_settings, open_run, overridden, settings_of
from unimetric.runs.model import build_model, loss_with_geometry
from unimetric.runs.record import read_images, read_record, write_record
from unimetric.runs.rows import read_table, readable
from unimetric.runs.weights import Trained, read_tensors, write_tensors
from unimetric.spec import create

Weights = dict[str, Tensor]


def interpolate(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    alphas: Sequence[float] = (),
    tolerance: float = 0.0,
    note: Callable[[str], None] | None = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Write weights between the start and the end of a run, or of an average of runs.

        w(alpha) = (1 - alpha) start + alpha mean over runs of end

    The output is a folder that `evaluate`, `adapt`, `transfer` and `export` read like a run folder. It has no
    training log, so a report skips it. Statistics of BatchNorm are interpolated like weights.

    Reference:
        Robust fine-tuning of zero-shot models (Wortsman et al., CVPR 2022); Model soups (Wortsman et al., ICML 2022).

    Args:
        runs: Run folders with the same backbone, adapter, head, starting weights, dataset and split. Paths of the dataset may
            differ if `data.json` has the same images.
        out: Folder to create.
        alphas: Values from 0 (start) to 1 (end). If there are several, the validation classes of the run decide;
            test classes are never used. Empty for 0, 0.1, ..., 1 with one run, and for 1 with several.
        tolerance: Loss of the score on validation classes that is accepted for a smaller alpha, such as 0.01.
        note: Callback with a line per alpha.
        progress: Callback with (done, all) for the images of one alpha.
        overrides: Settings that may differ from training, such as `dataset` or `device`.

    Returns:
        `alpha`, `runs`, and `validation`: the values `validation/METRIC` by alpha, if there were several. The file
        `interpolation.json` has the same.
    """
    chosen = _check_alphas(alphas or ((1.0,) if len(runs) > 1 else tuple(round(0.1 * step, 1) for step in range(11))), tolerance)
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UnimetricError(f"{out}: must be an empty or new folder", "choose another --out")
    check_writable(out / "config.toml")
    ends = _open_ends(runs, overrides, choosing=len(chosen) > 1)
    found: dict[str, Any] = {"runs": [str(run) for run in runs]}
    alpha = chosen[0]
    if len(chosen) > 1:
        values = _validate(ends, chosen, note=note, progress=progress)
        metrics = ends.config.metrics[: ends.config.chosen_by]
        scores = {each: score(metrics, values[each], "validation") for each in chosen}
        alpha = min(each for each in chosen if scores[each] >= max(scores.values()) - tolerance)
        found["validation"] = {f"{each:g}": values[each] for each in chosen}
    found["alpha"] = alpha
    _write(out, ends, found)
    return found


@dataclass(frozen=True)
class _Ends:
    """Both ends of the line: settings and folder of the first run, and weights."""

    config: RunConfig
    folder: Path
    model: Any
    start: Weights
    end: Weights

    def at(self, alpha: float) -> Weights:
        """Return the weights at a point of the line; integers are those of the end."""
        return {key: torch.lerp(self.start[key], end, alpha) if end.is_floating_point() else end for key, end in self.end.items()}


def _check_alphas(alphas: Sequence[float], tolerance: float) -> list[float]:
    wrong = [alpha for alpha in alphas if not 0 <= alpha <= 1]
    if wrong:
        raise UnimetricError(f"`alpha` must be from 0 (start) to 1 (end), got {wrong[0]:g}", "use `--alpha 0.5`")
    if not 0 <= tolerance < 1:
        raise UnimetricError(f"`tolerance` must be at least 0 and below 1, got {tolerance:g}", "use `--tolerance 0.01` for one point")
    return sorted(set(map(float, alphas)))


def _open_ends(runs: Sequence[str | Path], overrides: dict[str, Any], *, choosing: bool) -> _Ends:
    """Open all runs, check that they fit together, and average their weights.

    Test classes of one must not be training classes of another. To choose alpha, they must have the same validation classes, too.
    """
    configs = [load_settings(run) for run in runs]
    same = ("backbone", "adapter", "head", "dataset", "split", *(("seed",) if choosing else ()))
    for key in same:
        for run, config in zip(runs, configs, strict=True):
            if getattr(config, key) == getattr(configs[0], key):
                continue
            if key not in ("dataset", "split") or not _have_same_images(run, runs[0]):  # else, they have moved
                raise UnimetricError(
                    f"{run}: `{key} = {getattr(config, key)!r}`, but {runs[0]} has `{key} = {getattr(configs[0], key)!r}`",
                    "average runs with the same network, dataset and split; runs with another `seed` need `--alpha`",
                )
    located = {key: value for key, value in overrides.items() if key == "backbone"}
    opened = [_open(run, located) for run in runs]
    (config, model, start, _), last = opened[0], [end for *_, end in opened]
    for run, (_, _, own, _) in zip(runs, opened, strict=True):
        other = next((key for key in own if not torch.equal(own[key], start[key])), "")
        if other:
            raise UnimetricError(
                f"{run}: started from other weights than {runs[0]}: `{other}`",
                "average runs with the same `seed`, which sets the random weights of the head",
            )
    end = {key: torch.stack([each[key] for each in last]).mean(0) if value.is_floating_point() else value for key, value in last[0].items()}
    return _Ends(overridden(config, overrides, runs[0]), Path(runs[0]), model, start, end)


def _have_same_images(run: str | Path, other: str | Path) -> bool:
    """Return whether `data.json` of both runs has the same images, at any time stamps."""
    first, second = (
        {part: [image.without_time for image in images] for part, images in read_images(Path(each)).items()} for each in (run, other)
    )
    return first == second != {}


def _open(run: str | Path, overrides: dict[str, Any]) -> tuple[RunConfig, Any, Weights, Weights]:
    """Return settings and model of a run, and its weights at the start and at the end."""
    notes = read_tensors(Path(run) / "model.safetensors", "name a run folder with weights")[1]
    if "exported" in notes:
        raise UnimetricError(f"{run}: is an export, which does not store where its training started", "name the run folder")
    config, model = open_run(run, overrides)
    start, end = (Trained(each).state_dict() for each in (build_model(config), model))
    return config, model, start, {key: value.clone() for key, value in end.items()}  # `_validate` overwrites the model


def _validate(
    ends: _Ends, alphas: Sequence[float], *, note: Callable[[str], None] | None, progress: Progress | None
) -> dict[float, dict[str, float]]:
    """Return the metric values on the validation classes of the run, by alpha."""
    config, model = ends.config, ends.model
    table, split = read_table(config)
    if not len(split.validation):
        raise UnimetricError(
            f"{ends.folder}: its split has no validation classes, and test classes must not choose alpha",
            "train with `split=standard(validation=0.2)`, or choose it yourself: `--alpha 0.5`",
        )
    rows, _ = readable(config, table, split.validation, progress=progress)
    check_own_images(ends.folder, config, table, {"validation": rows})
    fabric = open_fabric(config)
    wrapped = set_up(fabric, model)
    loader = open_images(fabric, config, model, table.take(rows), progress=progress)
    view, loss = View(create("transforms", config.transform)), loss_with_geometry(config, model.dim)
    found = {}
    for alpha in alphas:
        Trained(model).load_state_dict(ends.at(alpha))
        batch = evaluation_batch(config, fabric)
        points = embed(fabric, wrapped, loader, np.arange(len(rows)), view, batch=batch, progress=progress)
        values = measure(space_of(points, table, rows, loss=loss, geometry=config.geometry), config.test_metrics)
        found[alpha] = {f"validation/{key}": value for key, value in values.items()}
        if note is not None:
            note("  ".join([f"alpha {alpha:<5g}", *(f"{key} {value:.4f}" for key, value in found[alpha].items())]))
    return found


def _write(out: Path, ends: _Ends, found: dict[str, Any]) -> None:
    """Write the folder under a temporary name, and rename it when it is complete."""
    own = load(ends.folder / "config.toml")
    notes: dict[str, Any] = {"interpolated": found, "settings": settings_of(own)}
    if own.adapter:
        notes["backbone"] = own.backbone
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        write_tensors(temporary / "model.safetensors", ends.at(found["alpha"]), notes)
        record = read_record(ends.folder)
        if record is not None:
            write_record(temporary, {key: value for key, value in record.items() if key != "files"})
        write_json(temporary / "interpolation.json", found)
        write_text(temporary / "config.toml", own.dump())
        temporary.rename(out)
    except OSError as error:
        raise UnimetricError(f"{out}: cannot be written: {error.strerror or error}", "choose another --out") from None
    finally:
        with suppress(OSError):
            shutil.rmtree(temporary)
