"""Few-shot adaptation of the last layer: `unimetric adapt`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.analysis.curves import t_interval
from unimetric.analysis.evaluate import check_metrics
from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.files import write_json
from unimetric.geometry import seed_dice
from unimetric.heads.identity import Identity
from unimetric.images.loading import Progress, View, to_device
from unimetric.images.table import Table
from unimetric.kinds import Head
from unimetric.metrics import measure
from unimetric.runs.device import Fabric, evaluation_batch, open_fabric, set_up
from unimetric.runs.embed import embed, open_images, space_of
from unimetric.runs.folder import check_own_images, open_run
from unimetric.runs.model import Model, loss_of
from unimetric.runs.rows import read_table, readable
from unimetric.spec import bind, complete_arguments, create, parse
from unimetric.splits.published import episodes as published_episodes

#: The metrics of the paper.
METRICS = ("recall(k=1)", "map_at_k(k=1000, divide='class')")


def adapt(
    run: str | Path,
    *,
    shots: int = 5,
    episodes: int = 10,
    draw: str = "auto",
    iterations: int = 0,
    lr: float = 1e-4,
    looks: int = 16,
    epoch: str = "last",
    with_replacement: bool = True,
    metrics: Sequence[str] = METRICS,
    seed: int = 0,
    progress: Progress | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Fine-tune the last layer on a few images of each test class, and compare with zero-shot.

    In each episode, some images of each test class are the support set. A copy of the head's last
    linear layer is tuned on it: margin loss with distance-weighted mining, a fixed boundary, Adam,
    batches of 112 with two images per class, drawn with replacement. All other test images are
    searched before and after. The backbone does not change, so each image passes through it once.

    A head with test-time weights, such as `diva`, is tuned with equal weights and evaluated with those
    of the run. `head="diva(weights=(1, 1, 1, 1))"` evaluates with equal weights.

    Neighbors are searched by the cosine, the geometry of the margin loss, even if the run's own loss
    has another geometry.

    Differs from the paper:
        The paper adapts the best epoch on validation classes; the authors' code adapts the last epoch,
        because its `best_weights` is a reference to the live weights. The authors draw a new random
        crop in each step. Here `looks` random crops per support image pass through the backbone once,
        and each batch draws from them. An image drawn twice for a pair gets two different crops.

    Reference:
        Characterizing generalization under out-of-distribution shifts in deep metric learning
        (Milbich et al., NeurIPS 2021), section 4.4.

    Args:
        run: Run folder, trained on the same split. With `published(..., validation=True)` and
            `chosen_by=2`, its best epoch is selected on validation classes by recall@1 + mAP@1000.
        shots: Number of support images per class.
        episodes: Number of episodes, if they are drawn at random.
        draw: `published` reads the episodes of the run's split file, `random` draws them. `auto` reads
            them if there are any.
        iterations: Number of steps per episode. 0 uses the authors' 1,000 up to two shots and 1,500 above.
        lr: Learning rate of Adam.
        looks: Number of random crops per support image; 0 uses the center crop.
        epoch: Adapted weights. `last` reads `checkpoint.safetensors`, `best` reads `model.safetensors`.
        with_replacement: Whether batches draw classes and images with replacement.
        metrics: Metric spec strings.
        seed: Random seed of episodes, crops, batches and triplets.
        progress: Callback with (finished episodes, all episodes).
        overrides: Settings that may differ from training, such as `dataset` (the same images elsewhere),
            `backbone` (the same weights elsewhere), `device`, or test-time arguments of `head`.

    Returns:
        `summary`, mean and half width of the 95% t-interval over episodes of `zero/METRIC`, `few/METRIC`
        and their difference `gain/METRIC`; `episodes`, the values of each; and the settings. The run
        folder's `adapt_<shots>_shots.json` stores the same.
    """
    check_metrics(metrics)
    config, model = open_run(run, overrides, epoch=epoch)
    fabric = open_fabric(config)
    table, split = read_table(config)
    test, _ = readable(config, table, split.test)
    check_own_images(run, config, table, {"test": test})
    supports = draw_episodes(config, table, test, shots=shots, episodes=episodes, draw=draw, seed=seed)
    if len(supports) < 2:
        raise UnimetricError(f"a confidence interval needs at least 2 episodes, got {len(supports)}", "use `--episodes 2` or more")
    steps = iterations or default_iterations(shots)

    model = model.to(fabric.device).eval()
    layers = last_layers(model.head)
    if not layers:
        raise UnimetricError(f"{run}: `head = {config.head!r}` has no linear layer to tune", "train a run with `head=linear(dim=128)`")
    images = TestImages(table, test)
    tokens = embed_global(fabric, config, model, images, supports, crops=looks, seed=seed)
    with torch.inference_mode():
        zero = _embed_tokens(model.head, tokens.centers)
    lines = []
    for number, support in enumerate(supports):
        tuned = tune_head(
            model.head,
            layers,
            tokens.crops_of(images.positions(support)),
            np.unique(table.labels[support], return_inverse=True)[1],
            iterations=steps,
            lr=lr,
            beta=_boundary(config),
            with_replacement=with_replacement,
            seed=seed,
        )
        with torch.inference_mode():
            few = _embed_tokens(tuned, tokens.centers)
        lines.append(evaluate_episode(images, support, zero=zero, few=few, metrics=metrics))
        if progress is not None:
            progress(number + 1, len(supports))
    result = {
        "shots": shots,
        "iterations": steps,
        "lr": lr,
        "looks": looks,
        "draw": draw,
        "drawn": episodes,
        "epoch": epoch,
        "with_replacement": with_replacement,
        "head": config.head,
        "tuned_weights": equal_weights(model.head),
        "seed": seed,
        "run_id": config.run_id,
        "split": config.split,
        "summary": {key: t_interval([line[key] for line in lines]) for key in lines[0]},
        "episodes": lines,
    }
    write_json(Path(run) / f"adapt_{shots}_shots.json", result)
    return result


def default_iterations(shots: int) -> int:
    """Return the authors' number of steps per episode.

    Args:
        shots: Number of support images per class.
    """
    return 1000 if shots <= 2 else 1500


class TestImages:
    """The test images of a dataset.

    Args:
        table: Table of the dataset.
        rows: Indices of the test rows.
    """

    __test__ = False  # not a test of pytest

    def __init__(self, table: Table, rows: np.ndarray) -> None:
        self.table, self.rows = table, rows
        self._position = {int(row): position for position, row in enumerate(rows)}

    def positions(self, rows: np.ndarray) -> np.ndarray:
        """Return the positions of some rows of the table among the test rows."""
        return np.array([self._position[int(row)] for row in rows], np.int64)


@dataclass(frozen=True)
class GlobalTokens:
    """Global tokens of the test images.

    Args:
        centers: Tokens of the center crop of each test image.
        crops: Tokens of L random crops of each of S support images.
        support: Positions of the support images among the test images, sorted.
    """

    centers: Float[Tensor, "N C"]
    crops: Float[Tensor, "L S C"]
    support: Int[np.ndarray, "S"]

    def crops_of(self, positions: np.ndarray) -> Float[Tensor, "L K C"]:
        """Return the tokens of the crops of some support images."""
        return self.crops[:, to_device(np.searchsorted(self.support, positions), self.crops.device)]


def embed_global(
    fabric: Fabric, config: RunConfig, model: Model, images: TestImages, supports: Sequence[np.ndarray], *, crops: int, seed: int
) -> GlobalTokens:
    """Pass each test image and the crops of each support image through the backbone once.

    Args:
        fabric: Device of the run.
        config: Settings of the run.
        model: Model of the run.
        images: Test images.
        supports: Rows of the support images of each episode.
        crops: Number of random crops per support image; 0 uses the center crop.
        seed: Random seed of the crops.

    Raises:
        UnimetricError: The head reads more than the global token.
    """
    body = set_up(fabric, Model(model.backbone, Identity(features=model.backbone.channels)))
    loader = open_images(fabric, config, model, images.table.take(images.rows))
    recipe = create("transforms", config.transform)
    everything = np.arange(len(images.rows))
    batch = min(evaluation_batch(config, fabric), len(everything))
    _check_global(model, next(iter(loader.load([(everything[:batch], View(recipe))]))))  # the shape of all later batches

    def tokens(rows: np.ndarray, view: View) -> Float[Tensor, "N C"]:
        return embed(fabric, body, loader, rows, view, batch=batch).clone()  # a clone is not an inference tensor

    centers = tokens(everything, View(recipe))
    support = np.unique(images.positions(np.concatenate(supports)))
    drawn = [tokens(support, View(recipe, seed=seed, epoch=number)) for number in range(crops)]
    return GlobalTokens(centers, torch.stack(drawn or [centers[to_device(support, fabric.device)]]), support)


def evaluate_episode(images: TestImages, support: np.ndarray, *, zero: Tensor, few: Tensor, metrics: Sequence[str]) -> dict[str, float]:
    """Compute metrics before and after tuning on the test images outside the support set.

    Args:
        images: Test images.
        support: Rows of the support images.
        zero: (N, D) embeddings of all test images before tuning.
        few: (N, D) embeddings after tuning.
        metrics: Metric spec strings.

    Returns:
        Values by `zero/METRIC`, `few/METRIC` and their difference `gain/METRIC`.
    """
    query = np.flatnonzero(~np.isin(images.rows, support))
    line: dict[str, float] = {}
    for name, embeddings in (("zero", zero), ("few", few)):
        space = space_of(embeddings[to_device(query, embeddings.device)], images.table, images.rows[query])
        line |= {f"{name}/{key}": value for key, value in measure(space, list(metrics)).items()}
    tuned = [key.removeprefix("few/") for key in line if key.startswith("few/")]
    return line | {f"gain/{key}": line[f"few/{key}"] - line[f"zero/{key}"] for key in tuned}


def draw_episodes(
    config: RunConfig, table: Table, test: np.ndarray, *, shots: int, episodes: int, draw: str = "auto", seed: int = 0
) -> list[np.ndarray]:
    """Draw the support images of each episode, or read published ones.

    Args:
        config: Settings of the run. Its split may name a file of episodes.
        table: Table of the dataset.
        test: Indices of its test rows.
        shots: Number of support images per class.
        episodes: Number of episodes, if they are drawn at random.
        draw: `published`, `random` or `auto`; see `adapt`.
        seed: Random seed.

    Returns:
        Rows of the support images of each episode.
    """
    if draw not in ("auto", "published", "random"):
        raise UnimetricError(f"`draw` must be one of auto, published, random, got `{draw}`", "use `--draw auto`")
    if draw != "random":
        found = _read_published(config, table, shots, seed)
        if found:
            return [support[np.isin(support, test)] for support in found]  # without skipped images
        if draw == "published":
            raise UnimetricError(f"`split = {config.split!r}` has no published episodes of {shots} shots", "use `--draw random`")
    labels, counts = np.unique(table.labels[test], return_counts=True)
    if shots < 2:
        raise UnimetricError(f"`shots` must be at least 2, got {shots}", "use `--shots 2`")
    if counts.min() < shots + 2:
        smallest = table.class_names[labels[counts.argmin()]]
        raise UnimetricError(
            f"a class needs {shots} support images and two more to search, but `{smallest}` has only {counts.min()} images",
            f"use fewer shots, at least 2, or a dataset without the {(counts < shots + 2).sum()} classes of fewer than {shots + 2} images",
        )
    rows = {label: test[table.labels[test] == label] for label in labels}
    generators = [np.random.default_rng((seed, number)) for number in range(episodes)]
    return [np.concatenate([rng.choice(rows[label], shots, replace=False) for label in labels]) for rng in generators]


def _read_published(config: RunConfig, table: Table, shots: int, seed: int) -> list[np.ndarray]:
    """Return the episodes of the split's file, or nothing if it has none."""
    if parse(config.split).name not in ("published", "ood"):
        return []
    arguments = {"split": 1} | bind("splits", config.split, seed=seed)[1]
    known = {key: arguments[key] for key in ("path", "split", "on_missing") if key in arguments}
    return published_episodes(table, shots=shots, **known)


def last_layers(head: Head) -> list[str]:
    """Return the names of the linear layers that make the embedding.

    These are the last layer, or one layer per branch; none if the head has none.

    Args:
        head: Head of the run.
    """
    linear = [name for name, part in head.named_modules() if isinstance(part, nn.Linear)]
    return linear[-len(head.dims) :]


def equal_weights(head: Head) -> tuple[float, ...] | None:
    """Return equal weights for the branches of a head with test-time weights, else None."""
    if "weights" not in head.test_time:
        return None
    return (1.0,) * len(head.dims)


def tune_head(
    head: Head,
    layers: Sequence[str],
    views: Float[Tensor, "L S C"],
    labels: np.ndarray,
    *,
    iterations: int,
    lr: float = 1e-4,
    batch_size: int = 112,
    beta: float = 1.2,
    with_replacement: bool = True,
    seed: int = 0,
) -> nn.Module:
    """Tune the last layers of a copy of a head on the global tokens of some images.

    The copy has equal branch weights while it is tuned, and the head's own afterwards.

    Args:
        head: Head of the run. It does not change.
        layers: Names of the tuned layers. All other parameters are frozen.
        views: Global tokens of L random crops of each of S support images.
        labels: Classes of the support images from 0 on, of shape (S,).
        iterations: Number of steps.
        lr: Learning rate of Adam, without weight decay.
        batch_size: Number of images per step, two per class.
        beta: Fixed boundary of the margin loss.
        with_replacement: Whether batches draw classes and images with replacement.
        seed: Random seed of batches, crops and triplets.

    Returns:
        The tuned copy.
    """
    tuned: Any = copy.deepcopy(head).eval().requires_grad_(False)
    equal = equal_weights(head)
    own = tuned.weights if equal else None
    if equal:
        tuned.weights = equal
    trainable = [parameter for name in layers for parameter in tuned.get_submodule(name).requires_grad_(True).parameters()]
    optimizer = torch.optim.Adam(trainable, lr=lr)
    loss = create("losses", f"margin(beta={beta}, learn_beta=False, or_count=True)", miner="distance_weighted").to(views.device)
    seed_dice(loss, seed)
    text = f"samples_per_class(n=2, with_replacement={with_replacement})"
    sampler = create("samplers", text, labels=labels, batch_size=batch_size, seed=seed)
    rows = []
    for step in range(iterations):  # all batches first, so that the loop does not synchronize with the GPU
        sampler.epoch = step // len(sampler)
        rows.append(sampler.batch(step % len(sampler)))
    batches = np.stack(rows)
    which = _draw_crops(batches, len(views), seed)
    classes = to_device(labels[batches], views.device)
    plan = to_device(which * views.shape[1] + batches, views.device)
    flat = views.flatten(0, 1)
    for step in range(iterations):
        value = loss(_embed_tokens(tuned, flat[plan[step]]), classes[step])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    if equal:
        tuned.weights = own
    return tuned.requires_grad_(False)


def _draw_crops(batches: np.ndarray, crops: int, seed: int) -> np.ndarray:
    """Draw a crop of each image of each batch. Two equal images of a pair get different crops."""
    rng = np.random.default_rng((seed, 1))
    which = rng.integers(crops, size=batches.shape)
    if crops > 1:
        first, second = which[:, ::2], which[:, 1::2]
        other = (first + rng.integers(1, crops, size=first.shape)) % crops
        which[:, 1::2] = np.where(batches[:, ::2] == batches[:, 1::2], other, second)
    return which


def _embed_tokens(head: nn.Module, tokens: Float[Tensor, "B C"]) -> Float[Tensor, "B D"]:
    """Return the embeddings of global tokens."""
    return head(tokens[:, None])


def _check_global(model: Model, images: Float[Tensor, "B 3 H W"]) -> None:
    """Raise an error if the head reads more than the global token.

    Only the global token is stored.
    """
    with torch.inference_mode():
        tokens = model.backbone(images).float()
        try:
            same = torch.allclose(model.head(tokens), model.head(tokens[:, :1]), rtol=1e-4, atol=1e-5)
        except (RuntimeError, IndexError):
            same = False
    if not same:
        raise UnimetricError("`adapt` requires a head that reads only the global token", "use a run with `head = 'linear'`")


def _boundary(config: RunConfig) -> float:
    """Return the `beta` of the run's margin loss, or the authors' 1.2 if it has another loss."""
    text = loss_of(config)
    if parse(text).name != "margin":
        return 1.2
    return float(complete_arguments("losses", text)["beta"])
