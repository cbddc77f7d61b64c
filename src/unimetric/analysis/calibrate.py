"""Choose a threshold on validation classes, and check it on test classes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from unimetric.analysis.canvas import Canvas
from unimetric.errors import UnimetricError
from unimetric.files import write_json
from unimetric.geometry.pair_scores import PairScores, Rates
from unimetric.geometry.space import Space
from unimetric.images.loading import Progress
from unimetric.runs.device import open_fabric
from unimetric.runs.embed import embed_all, space_of
from unimetric.runs.folder import check_own_images, open_run
from unimetric.runs.model import loss_with_geometry
from unimetric.runs.rows import read_table, readable

#: File of a run folder with its calibrated threshold.
FILE = "calibration.json"


def calibrate(
    run: str | Path,
    *,
    fpr: float = 0.01,
    level: float = 0.95,
    draws: int = 1000,
    out: str | Path | None = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Choose a run's threshold on validation classes, and report its errors on test classes.

    A pair of images is accepted if its score exceeds the threshold. The threshold is the lowest score that
    at most a fraction `fpr` of the pairs of two validation classes exceeds. Validation classes were not
    trained on. The threshold of the training classes is reported next to it: the scores of classes that
    were trained on need not predict those of new ones.

    Args:
        run: Run folder, trained with validation classes.
        fpr: False positive rate: fraction of the pairs of two classes that may be accepted.
        level: Level of the intervals over whole classes.
        draws: Number of bootstrap draws.
        out: JSON file. The figure is a PNG file of the same name. Defaults to `calibration.json` in the run
            folder, which `evaluate` reads.
        progress: Callback with (done, all).
        overrides: Settings that may differ from training, such as `dataset` or `device`.

    Returns:
        The content of the JSON file. Intervals of too few classes are None; see `PairScores.interval`.
    """
    if not 0 < fpr < 1 or not 0 < level < 1:
        raise UnimetricError(f"`--fpr` and `--level` must be above 0 and below 1, got {fpr} and {level}", "use `--fpr 0.01 --level 0.95`")
    file = Path(run) / FILE if out is None else Path(out)
    spaces = embed_parts(run, progress=progress, **overrides)
    pairs = {part: PairScores(space) for part, space in spaces.items()}
    threshold, train_threshold = pairs["validation"].threshold(fpr), pairs["train"].threshold(fpr)
    for part, chosen in (("validation", threshold), ("train", train_threshold)):
        if not math.isfinite(chosen):
            raise UnimetricError(f"`--fpr` must reject a pair of the {part} classes, got {fpr}", "use a smaller rate")
    drawn = pairs["validation"].resample(fmr=fpr, draws=draws)
    result: dict[str, Any] = {
        "fpr": fpr,
        "level": level,
        "score": spaces["test"].geometry,
        "threshold": threshold,
        "threshold_interval": pairs["validation"].interval(drawn.threshold, level),
        "validation": _describe(pairs["validation"], pairs["validation"].rates(threshold), level, draws),
        "test": _describe(pairs["test"], pairs["test"].rates(threshold), level, draws),
        "train_threshold": train_threshold,
        "test_at_train_threshold": _describe(pairs["test"], pairs["test"].rates(train_threshold), level, draws),
    }
    write_json(file, result)
    draw_calibration(file.with_suffix(".png"), pairs, result)
    return result


def embed_parts(run: str | Path, *, progress: Progress | None = None, **overrides: Any) -> dict[str, Space]:
    """Return the spaces of the training, validation and test images of a run.

    Args:
        run: Run folder.
        progress: Callback with (done, all).
        overrides: Settings that may differ from training.
    """
    config, model = open_run(run, overrides)
    table, split = read_table(config)
    if not len(split.validation):
        raise UnimetricError(
            f"{run}: a threshold needs validation classes that were not trained on, but `split = {config.split!r}` has none",
            "train with `split=standard(validation=0.2)`",
        )
    parts = {part: readable(config, table, rows)[0] for part, rows in split.parts.items()}
    check_own_images(run, config, table, parts)
    parts["train"] = np.unique(parts["train"])  # a sampled split may repeat rows
    loss, fabric = loss_with_geometry(config, model.dim), open_fabric(config)
    every = np.unique(np.concatenate(list(parts.values())))
    embeddings: Tensor = embed_all(fabric, config, model, table.take(every), progress=progress)
    position = {part: np.searchsorted(every, rows) for part, rows in parts.items()}
    return {part: space_of(embeddings[position[part]], table, rows, loss=loss, geometry=config.geometry) for part, rows in parts.items()}


def _describe(pairs: PairScores, rates: Rates, level: float, draws: int) -> dict[str, Any]:
    """Return the rates of some classes at a threshold, with intervals over whole classes."""
    drawn = pairs.resample(threshold=rates.threshold, draws=draws)
    return {
        "classes": pairs.space.classes,
        "images": pairs.space.size,
        "fpr": rates.fmr,
        "fpr_interval": pairs.interval(drawn.fmr, level),
        "fnr": rates.fnmr,
        "fnr_interval": pairs.interval(drawn.fnmr, level),
    }


def read_calibration(run: str | Path) -> dict[str, Any] | None:
    """Return the calibration of a run folder, or None if it has none.

    Args:
        run: Run folder.
    """
    file = Path(run) / FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        test = {"test": {key: float(found["test"][key]) for key in ("fpr", "fnr")}} if "test" in found else {}
        return {key: float(found[key]) for key in ("fpr", "threshold")} | {"score": str(found["score"])} | test
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnimetricError(f"{file}: unreadable: {error}", "remove it, or run `unimetric calibrate` again") from None


def check_threshold(run: str | Path | dict[str, Any], space: Space) -> str:
    """Return a sentence about a run's stored threshold on other images, or "" without one.

    Args:
        run: Run folder, or its calibration.
        space: Embeddings of the run.
    """
    stored = run if isinstance(run, dict) else read_calibration(run)
    if not stored or stored["score"] != space.geometry:
        return ""
    rates = PairScores(space).rates(stored["threshold"])
    return (
        f"threshold {stored['threshold']:.4f}, calibrated for a false positive rate of {stored['fpr']:.4g}: here {rates.fmr:.4g}, "
        f"{rates.fmr / stored['fpr']:.2f} times as many; {rates.fnmr:.2%} of the pairs of one class are missed"
    )


def draw_calibration(file: Path, pairs: dict[str, PairScores], result: dict[str, Any]) -> None:
    """Draw the false positive rate over the threshold, one line per part of the split.

    The parts are the training, validation and test classes.

    Args:
        file: PNG file.
        pairs: Pairs of each part.
        result: Result of `calibrate`.
    """
    colors = {"train": "tab:gray", "validation": "tab:blue", "test": "tab:orange"}
    with Canvas(file, width=9, height=3.6, rows=1, columns=2) as ((left, right),):
        for part, color in colors.items():
            threshold, fmr, fnmr = (values.cpu().numpy() for values in pairs[part].curve())
            some = fmr > 0
            left.plot(threshold[some], fmr[some], color=color, label=f"{part} classes")
            right.plot(fmr[some], 1 - fnmr[some], color=color, label=f"{part} classes")
        if result["threshold_interval"] is not None:
            low, high = result["threshold_interval"]
            left.axvspan(low, high, color=colors["validation"], alpha=0.2)
        left.axvline(result["threshold"], color=colors["validation"], linestyle="--", label=f"threshold {result['threshold']:.3f}")
        left.axvline(
            result["train_threshold"], color=colors["train"], linestyle=":", label=f"of training classes {result['train_threshold']:.3f}"
        )
        left.axhline(result["fpr"], color="black", linewidth=0.8)
        thresholds, rates, _ = pairs["test"].curve()
        left.set_xlim(left=float(thresholds[rates <= 0.5][0]))  # half of the pairs are far from every useful threshold
        left.set(yscale="log", xlabel="threshold", ylabel="false positive rate")
        right.axvline(result["fpr"], color="black", linewidth=0.8)
        right.set(xscale="log", xlabel="false positive rate", ylabel="pairs of one class that are accepted")
        left.legend(fontsize=8)
        right.legend(fontsize=8)
