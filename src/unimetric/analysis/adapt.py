"""Few-shot adaptation of the last layer: `unimetric adapt`."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import t as student
from torch import Tensor, nn

from unimetric.analysis.evaluate import check_metrics
from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.files import write_text
from unimetric.geometry import seed_dice
from unimetric.heads.identity import Identity
from unimetric.images.loading import Progress, View, open_pictures
from unimetric.images.table import Table
from unimetric.metrics import measure
from unimetric.runs.device import open_fabric
from unimetric.runs.embed import embed, space_of
from unimetric.runs.folder import open_run, overridden
from unimetric.runs.model import Model, loss_of
from unimetric.runs.rows import read_table, readable
from unimetric.spec import bind, create, parse, signature
from unimetric.splits.published import episodes as published_episodes

#: What ooDML reports.
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
        (Milbich et al., NeurIPS 2021), section 4.5.

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
    config, model = open_run(run, backbone=overrides.get("backbone", ""), head=overrides.get("head", ""), epoch=epoch)
    config = overridden(config, overrides, run)
    fabric = open_fabric(config)
    table, split = read_table(config)
    test, _ = readable(config, table, split.test)
    supports = draw_episodes(config, table, test, shots=shots, episodes=episodes, draw=draw, seed=seed)
    if len(supports) < 2:
        raise UnimetricError(f"{len(supports)} episode(s) have no spread", "draw two episodes at least")
    steps = iterations or (1000 if shots <= 2 else 1500)

    model = model.to(fabric.device).eval()
    layers = last_layers(model.head)
    body: Any = Model(model.backbone, Identity(features=model.backbone.channels))
    body = fabric.setup(body) if any(parameter.requires_grad for parameter in body.parameters()) else body
    place = {int(row): number for number, row in enumerate(test)}
    pictures = open_pictures(
        table.take(test), device=fabric.device, mean=model.mean, std=model.std, residence=config.residence, workers=config.workers
    )
    recipe = create("transforms", config.transform)
    batch = min(config.evaluate_batch, len(test))
    _check_summary(model, next(iter(pictures.load([(np.arange(batch), View(recipe))]))))  # as many as later: shapes are compiled for

    def summaries(rows: np.ndarray, look: View) -> Float[Tensor, "N C"]:
        return embed(fabric, body, pictures, rows, look, batch=batch).clone()  # out of inference mode

    centres = summaries(np.arange(len(test)), View(recipe))
    seen = np.unique([place[int(row)] for support in supports for row in support])
    views = [summaries(seen, View(recipe, seed=seed, epoch=number)) for number in range(looks)] or [centres[_index(seen, fabric.device)]]
    stacked = torch.stack(views)  # (L, S, C)

    with torch.inference_mode():
        zero = _embedded(model.head, centres)
    numbers = []
    for number, support in enumerate(supports):
        inside = np.searchsorted(seen, [place[int(row)] for row in support])
        tuned = tune(
            model.head,
            layers,
            stacked[:, _index(inside, fabric.device)],
            np.unique(table.labels[support], return_inverse=True)[1],
            iterations=steps,
            lr=lr,
            beta=_boundary(config),
            with_replacement=with_replacement,
            seed=seed,
        )
        query = np.flatnonzero(~np.isin(test, support))
        with torch.inference_mode():
            few = _embedded(tuned, centres)
        line: dict[str, float] = {}
        for name, embeddings in (("zero", zero), ("few", few)):
            space = space_of(embeddings[_index(query, fabric.device)], table, test[query])
            line |= {f"{name}/{key}": value for key, value in measure(space, list(metrics)).items()}
        line |= {f"gain/{key[4:]}": value - line[f"zero/{key[4:]}"] for key, value in list(line.items()) if key.startswith("few/")}
        numbers.append(line)
        if progress is not None:
            progress(number + 1, len(supports))
    result = {
        "shots": shots,
        "iterations": steps,
        "lr": lr,
        "looks": looks,
        "epoch": epoch,
        "with_replacement": with_replacement,
        "head": config.head,
        "tuned_weights": equal_weights(model.head),
        "seed": seed,
        "split": config.split,
        "summary": {key: t_interval([line[key] for line in numbers]) for key in numbers[0]},
        "episodes": numbers,
    }
    write_text(Path(run) / f"adapt_{shots}_shots.json", json.dumps(result, indent=1))
    return result


def draw_episodes(
    config: RunConfig, table: Table, test: np.ndarray, *, shots: int, episodes: int, draw: str = "auto", seed: int = 0
) -> list[np.ndarray]:
    """Rows of the support pictures of each episode.

    Args:
        config: its split may name a file of episodes.
        table: the dataset.
        test: its test rows.
        shots, episodes, draw, seed: see `adapt`.
    """
    if draw not in ("auto", "published", "random"):
        raise UnimetricError(f"episodes cannot be drawn by `{draw}`", "choose auto, published or random")
    if draw != "random":
        found = []
        if parse(config.split).name == "published":
            arguments = {"split": 1} | bind("splits", config.split, seed=seed)[1]
            found = published_episodes(
                table, shots=shots, **{key: arguments[key] for key in ("path", "split", "on_missing") if key in arguments}
            )
        if found or draw == "published":
            if not found:
                raise UnimetricError(f"`split = {config.split!r}` has no published episodes of {shots} shots", "use draw='random'")
            return [support[np.isin(support, test)] for support in found]  # without pictures that cannot be read
    labels, counts = np.unique(table.labels[test], return_counts=True)
    if shots < 2 or counts.min() <= shots + 1:
        raise UnimetricError(
            f"{shots} shots: a class needs two support pictures to learn from, and two more to search; the smallest has {counts.min()}",
            "choose from 2 shots on, and fewer than the smallest class has pictures",
        )
    rows = {label: test[table.labels[test] == label] for label in labels}
    dice = [np.random.default_rng((seed, number)) for number in range(episodes)]
    return [np.concatenate([rng.choice(rows[label], shots, replace=False) for label in labels]) for rng in dice]


def last_layers(head: nn.Module) -> list[str]:
    """Names of the linear layers that make the embedding: the last one; of a head with several branches, that of each.

    Args:
        head: the run's head.
    """
    linear = [name for name, part in head.named_modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise UnimetricError("the head has no linear layer to tune", "adapt a run with a head such as `linear(dim=512)`")
    branches = len(getattr(head, "dims", (0,)))
    return linear[-branches:]


def equal_weights(head: nn.Module) -> tuple[float, ...] | None:
    """Return equal weights for the branches of a head with test-time weights, else None."""
    if "weights" not in getattr(head, "test_time", ()):
        return None
    return (1.0,) * len(head.dims)  # type: ignore[arg-type]


def tune(
    head: nn.Module,
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
    learning = [parameter for name in layers for parameter in tuned.get_submodule(name).requires_grad_(True).parameters()]
    optimizer = torch.optim.Adam(learning, lr=lr)
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
    classes, plan = _index(labels[batches], views.device), _index(which * views.shape[1] + batches, views.device)
    flat = views.flatten(0, 1)
    for step in range(iterations):
        value = loss(_embedded(tuned, flat[plan[step]]), classes[step])
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


def t_interval(values: Sequence[float], *, level: float = 0.95) -> tuple[float, float]:
    """Mean, and half width of Student's interval around it (Student 1908).

    Args:
        values: one number an episode, two at least.
        level: how often such an interval holds the true mean.

    >>> mean, half = t_interval([0.6, 0.7, 0.8])
    >>> round(mean, 6), round(half, 4)
    (0.7, 0.2484)
    """
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)), float(student.ppf((1 + level) / 2, len(values) - 1)) * spread


def _embedded(head: nn.Module, summaries: Float[Tensor, "B C"]) -> Float[Tensor, "B D"]:
    return head(summaries[:, None])


def _check_summary(model: Model, images: Float[Tensor, "B 3 H W"]) -> None:
    """Stop where the head reads more than the summary: then the summaries that are kept are not enough."""
    with torch.inference_mode():
        tokens = model.backbone(images).float()
        try:
            same = torch.allclose(model.head(tokens), model.head(tokens[:, :1]), rtol=1e-4, atol=1e-5)
        except (RuntimeError, IndexError):
            same = False
    if not same:
        raise UnimetricError("the head reads more than the picture's summary, so its last layer alone cannot be adapted", "use `linear`")


def _boundary(config: RunConfig) -> float:
    """The run's own boundary where it has one, else the authors' 1.2."""
    text = loss_of(config)
    if parse(text).name != "margin":
        return 1.2
    part, arguments = bind("losses", text)
    return float(arguments.get("beta", signature(part).parameters["beta"].default))


def _index(numbers: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(numbers, np.int64)).to(device)
