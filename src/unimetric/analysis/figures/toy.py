"""Toy study of rho regularization: lines in the plane, and a small network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.analysis.canvas import Canvas
from unimetric.errors import UnimetricError
from unimetric.geometry import Pairs, Triplets, unit
from unimetric.geometry.space import Space
from unimetric.images.loading import Progress
from unimetric.kinds import Miner
from unimetric.metrics import measure
from unimetric.spec import create

Line = tuple[tuple[float, float], tuple[float, float]]

#: Points per line, drawn from 100 equally spaced ones.
_POINTS = 15

#: Distance at which the loss no longer pushes two classes apart.
_MARGIN = 0.1

#: Training and test lines of each figure. The paper does not state those of figure 11, which are chosen here.
TASKS: dict[str, tuple[tuple[Line, ...], tuple[Line, ...]]] = {
    "diagonal": (
        (((0.1, 0.1), (0.3, 0.3)), ((0.35, 0.35), (0.55, 0.55)), ((0.6, 0.6), (0.8, 0.8)), ((0.85, 0.85), (1.05, 1.05))),
        (((0.2, 0.2), (0.2, 0.4)), ((0.2, 0.55), (0.2, 0.85)), ((0.4, 0.2), (0.6, 0.2)), ((0.7, 0.2), (0.9, 0.2))),
    ),
    "vertical": (
        (((0.2, 0.1), (0.2, 1.0)), ((0.4, 0.1), (0.4, 1.0)), ((0.6, 0.1), (0.6, 1.0)), ((0.8, 0.1), (0.8, 1.0))),
        (((0.5, 0.2), (0.5, 0.4)), ((0.5, 0.7), (0.5, 0.9))),
    ),
}

#: Switch probability and positive margin of each variant. Distances are at most 2, so a margin of 2 pulls no pair.
VARIANTS: dict[str, tuple[float, float]] = {"contrastive": (0.0, 0.0), "rho": (0.001, 0.0), "rho, no pull": (0.001, 2.0)}


class _EveryTriplet(Miner):
    """Selection of all triplets of a batch."""

    gives = Triplets

    def forward(self, similarity: Float[Tensor, "B R"], pairs: Pairs) -> Triplets:
        anchor, positive, negative = (pairs.positive[:, :, None] & pairs.negative[:, None, :]).nonzero().T
        return Triplets(anchor, positive, negative, torch.ones_like(anchor, dtype=torch.bool))


@dataclass(frozen=True, eq=False)
class Trained:
    """One trained network.

    Args:
        points: Training and test points.
        labels: Their line numbers.
        embeddings: Their embeddings on the unit circle.
        scores: `recall` of the test points, `separation`, the fraction of pairs of different test classes that are at least the
            margin of the loss apart, `spectral_decay` of the training points, and `first` and `second`, their singular values as
            fractions.
    """

    points: tuple[Float[Tensor, "N 2"], Float[Tensor, "M 2"]]
    labels: tuple[Int[Tensor, "N"], Int[Tensor, "M"]]
    embeddings: tuple[Float[Tensor, "N 2"], Float[Tensor, "M 2"]]
    scores: dict[str, float]


def toy(out: str | Path, *, seeds: int = 5, progress: Progress | None = None) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Draw embeddings of lines in the plane with and without rho regularization.

    The figure shows the lines, their embeddings and the singular values. A network of 2-30-30-2 units is
    trained with contrastive loss on the triplets of 24 points, 200 times. Networks of the same seed start
    with the same weights, and have the same points and batches.

    Differs from the paper:
        The text describes the variant `rho`. In the authors' script, the regularized network has no loss on positive pairs at all.
        That is the variant `rho, no pull`.

    Reference:
        Figures 6 and 11 and appendix E of Revisiting training strategies and generalization performance in deep metric learning (Roth
        et al., ICML 2020).

    Args:
        out: PNG file.
        seeds: Number of seeds. Embeddings are those of the first.
        progress: Callback with (trained networks, all networks).

    Returns:
        By task and variant: each score of `Trained`, with one value per seed.
    """
    if seeds < 1:
        raise UnimetricError(f"`seeds` must be at least 1, got {seeds}", "use `--seeds 5`")
    trained: dict[str, dict[str, list[Trained]]] = {task: {variant: [] for variant in VARIANTS} for task in TASKS}
    networks = [(task, variant, seed) for task in TASKS for variant in VARIANTS for seed in range(seeds)]
    for number, (task, variant, seed) in enumerate(networks, 1):
        trained[task][variant].append(train_toy(task, variant, seed=seed))
        if progress is not None:
            progress(number, len(networks))
    with Canvas(out, width=13, height=5.6, rows=len(TASKS), columns=2 + len(VARIANTS)) as axes:
        for row, found in zip(axes, trained.values(), strict=True):
            _draw_task(row, found)
    return {
        task: {variant: {key: [each.scores[key] for each in some] for key in some[0].scores} for variant, some in found.items()}
        for task, found in trained.items()
    }


def train_toy(task: str, variant: str, *, seed: int, iterations: int = 200) -> Trained:
    """Train one network.

    Args:
        task: Key of `TASKS`.
        variant: Key of `VARIANTS`.
        seed: Seed of points, batches, weights and switches.
        iterations: Number of batches.
    """
    random = np.random.default_rng(seed)
    points, labels = zip(*[_sample(lines, random) for lines in TASKS[task]], strict=True)
    switch, positive_margin = VARIANTS[variant]
    miner: nn.Module = _EveryTriplet()
    if switch:
        miner = create("miners", f"rho(p_switch={switch})", miner=miner)
    loss = create("losses", f"contrastive(margin={_MARGIN}, positive_margin={positive_margin})", miner=miner)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(2, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 2))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.03)
    for _ in range(iterations):
        batch = torch.from_numpy(random.choice(len(points[0]), 24, replace=False))
        optimizer.zero_grad()
        loss(network(points[0][batch]), labels[0][batch]).backward()
        optimizer.step()
    with torch.no_grad():
        embeddings = unit(network(points[0])), unit(network(points[1]))
    return Trained(points, labels, embeddings, _scores(embeddings, labels))


def _sample(lines: Sequence[Line], random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return points of some lines, and their line numbers."""
    points = []
    for start, end in lines:
        where = np.linspace(0, 1, 100)[random.choice(100, _POINTS, replace=False), None]
        points.append(np.array(start) + where * (np.array(end) - np.array(start)))
    return torch.from_numpy(np.concatenate(points)).float(), torch.arange(len(lines)).repeat_interleave(_POINTS)


def _scores(embeddings: Sequence[Tensor], labels: Sequence[Tensor]) -> dict[str, float]:
    spaces = [Space(points.double(), numbers) for points, numbers in zip(embeddings, labels, strict=True)]
    # The embeddings have two dimensions, so the largest singular value is not dropped.
    decay, first, second = measure(spaces[0], ["spectral_decay(drop_largest=0)", "singular_values"]).values()
    apart = torch.cdist(embeddings[1], embeddings[1])[labels[1][:, None] != labels[1]]
    return {
        "recall": measure(spaces[1], ["recall(k=1)"])["recall(k=1)"],
        "separation": float((apart >= _MARGIN).double().mean()),
        "spectral_decay": decay,
        "first": first,
        "second": second,
    }


def _draw_task(axes: Sequence[Any], trained: dict[str, list[Trained]]) -> None:
    """Draw points, embeddings of each variant, and singular values."""
    data, *circles, bars = axes
    one = next(iter(trained.values()))[0]
    _scatter(data, one.points, one.labels)
    data.set_title("training (dots) and test (crosses)", fontsize=9)
    angle = np.linspace(0, 2 * np.pi, 200)
    for number, (circle, (variant, some)) in enumerate(zip(circles, trained.items(), strict=True)):
        circle.plot(np.cos(angle), np.sin(angle), ":", color="grey", linewidth=0.8)
        _scatter(circle, some[0].embeddings, some[0].labels)
        mean = {key: np.mean([each.scores[key] for each in some]) for key in some[0].scores}
        scores = f"recall@1 {mean['recall']:.2f}, separation {mean['separation']:.2f}\nspectral decay {mean['spectral_decay']:.2f}"
        circle.set_title(f"{variant}\n{scores}", fontsize=9)
        values = np.array([[each.scores["first"], each.scores["second"]] for each in some])
        places = np.arange(2) + 0.25 * (number - 1)
        bars.bar(places, values.mean(0), 0.25, yerr=values.std(0), capsize=3, label=variant)
    for axis in (data, *circles):
        axis.set_aspect("equal", adjustable="datalim")
    bars.set_xticks([0, 1], ["first", "second"])
    bars.set_title("singular values, training", fontsize=9)
    bars.legend(frameon=False, fontsize="small")


def _scatter(axis: Any, points: Sequence[Tensor], labels: Sequence[Tensor]) -> None:
    for part, (marker, colors) in enumerate((("o", "winter"), ("x", "autumn"))):
        axis.scatter(*points[part].numpy().T, c=labels[part].numpy(), cmap=colors, marker=marker, s=18)
