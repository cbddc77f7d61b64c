"""Lines in the plane, with and without rho regularization."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch
from typer.testing import CliRunner

from unimetric.analysis.figures.toy import TASKS, VARIANTS, _EveryTriplet, train_toy
from unimetric.cli import app
from unimetric.geometry import Pairs, compare, unit


def test_missing_pull_separates_and_lowers_decay(x86: bool) -> None:
    """The authors' script: test classes are further apart, and the spectrum decays less, in both figures."""
    for task in TASKS:
        plain, regular = ([train_toy(task, variant, seed=seed).scores for seed in (0, 1)] for variant in ("contrastive", "rho, no pull"))
        gains = {key: np.mean([each[key] for each in regular]) - np.mean([each[key] for each in plain]) for key in ("separation", "recall")}
        assert gains["separation"] > 0.1
        for before, after in zip(plain, regular, strict=True):
            # On ARM, the test classes of one run coincide.
            assert after["separation"] > before["separation"] + 0.1 or not x86
            assert after["spectral_decay"] < before["spectral_decay"] - 0.2
        if task == "vertical":
            assert gains["recall"] > 0 or (gains["recall"] == 0 and not x86)


def test_scores_follow_from_the_embeddings() -> None:
    found = train_toy("diagonal", "contrastive", seed=3, iterations=20)
    train, test = (unit(each).numpy().astype(float) for each in found.embeddings)
    labels = found.labels[1].numpy()
    assert train.shape == test.shape == (60, 2)
    values = np.linalg.svd(train, compute_uv=False)
    values /= values.sum()
    assert np.allclose([found.scores["first"], found.scores["second"]], values)
    assert np.isclose(found.scores["spectral_decay"], sum(0.5 * np.log(0.5 / value) for value in values))
    distances = np.linalg.norm(test[:, None] - test, axis=2)
    different = labels[:, None] != labels
    assert np.isclose(found.scores["separation"], (distances[different] >= 0.1).mean())
    np.fill_diagonal(distances, 9)
    assert np.isclose(found.scores["recall"], (labels[distances.argmin(1)] == labels).mean())


def test_every_triplet_equals_the_loop() -> None:
    labels = torch.tensor([0, 0, 1, 1, 1, 2])
    similarity, pairs = compare(torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), labels, None)
    assert isinstance(pairs, Pairs)
    found = _EveryTriplet()(similarity, pairs)
    triplets = set(zip(found.anchor.tolist(), found.positive.tolist(), found.negative.tolist(), strict=True))
    rows = itertools.permutations(range(6), 3)
    assert triplets == {(a, p, n) for a, p, n in rows if labels[a] == labels[p] and labels[a] != labels[n]}


def test_points_are_on_their_lines() -> None:
    found = train_toy("vertical", "rho", seed=0, iterations=1)
    for part, lines in enumerate(TASKS["vertical"]):
        for number, (start, end) in enumerate(lines):
            points = found.points[part][found.labels[part] == number]
            assert len(points) == 15 and torch.allclose(points[:, 0], torch.tensor(start[0]))
            assert start[1] <= points[:, 1].min() and points[:, 1].max() <= end[1]


def test_toy_command_draws_all_variants(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["figure", "toy", "--seeds", "1", "--out", str(tmp_path / "toy.png")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "toy.png").read_bytes()[:4] == b"\x89PNG"
    for task, variant in itertools.product(TASKS, VARIANTS):
        assert f"{task}, {variant}: recall" in done.output + done.stderr
