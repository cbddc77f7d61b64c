"""Nested dimensions: each term against the loss of the cut embeddings, in float64."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from unimetric.analysis.evaluate import evaluate
from unimetric.config import RunConfig, from_settings
from unimetric.errors import UnimetricError
from unimetric.objectives import Output
from unimetric.objectives.matryoshka import Matryoshka
from unimetric.spec import create
from unimetric.training.loop import train

LABELS = torch.arange(12) % 4


def output() -> Output:
    z = torch.randn(12, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    return Output(z, z[:, None], torch.zeros(12, 3, 2, 2))


def test_each_term_is_the_loss_of_the_cut_embeddings() -> None:
    given = output()
    terms = Matryoshka(loss="multi_similarity", dims=(4, 2), num_classes=4, dim=16)(given, LABELS)
    loss = create("losses", "multi_similarity")
    expected = {name: loss(given.embeddings[:, :size], LABELS) for name, size in {"loss": 16, "first 4": 4, "first 2": 2}.items()}
    assert {name: term.item() for name, term in terms.items()} == pytest.approx({name: term.item() for name, term in expected.items()})
    (slope,) = torch.autograd.grad(terms["first 2"], given.embeddings)
    assert slope[:, :2].abs().sum() > 0
    assert not slope[:, 2:].any()


def test_weights_multiply_the_losses_of_their_sizes() -> None:
    options: dict = {"loss": "multi_similarity", "dims": (4, 2), "num_classes": 4, "dim": 16}
    plain = Matryoshka(**options)(output(), LABELS)
    weighted = Matryoshka(**options, weights=(2, 8))(output(), LABELS)
    factors = {name: (weighted[name] / plain[name]).item() for name in plain}
    assert factors == pytest.approx({"loss": 1, "first 4": 2, "first 2": 8})
    whole = Matryoshka(**options | {"dims": (16, 2)}, weights=(3, 8))(output(), LABELS)
    assert {name: (whole[name] / plain[name]).item() for name in whole} == pytest.approx({"loss": 3, "first 2": 8})
    with pytest.raises(UnimetricError, match="one value for each of the 2 `dims` in `matryoshka`, got 1"):
        Matryoshka(**options, weights=(2,))


def test_small_sizes_learn_the_similarities_of_the_whole() -> None:
    given = output()
    options: dict = {"loss": "multi_similarity", "dims": (4, 2), "num_classes": 4, "dim": 16}
    terms = Matryoshka(**options, distillation=5.0)(given, LABELS)

    def rows(size: int) -> torch.Tensor:
        unit = torch.nn.functional.normalize(given.embeddings[:, :size].detach(), dim=1)
        return (unit @ unit.T).softmax(1)

    divergences = [(rows(16) * (rows(16) / rows(size)).log()).sum(1).mean() for size in (4, 2)]
    assert terms["distillation"].item() == pytest.approx(5 * torch.stack(divergences).mean().item())
    (slope,) = torch.autograd.grad(terms["distillation"], given.embeddings)
    assert slope[:, :4].abs().sum() > 0
    assert not slope[:, 4:].any()
    assert "distillation" not in Matryoshka(**options)(given, LABELS)


def test_prefixes_have_their_own_proxies_and_default_to_halves() -> None:
    objective = Matryoshka(loss="proxy_anchor", num_classes=4, dim=16)
    assert list(objective(output(), LABELS)) == ["loss", "first 8", "first 4", "first 2"]
    assert [tuple(each.shape) for each in objective.parameters()] == [(4, 16), (4, 8), (4, 4), (4, 2)]
    assert Matryoshka(num_classes=4, dim=8).prefixes == [8, 4, 2]  # one dimension would learn from rounding alone
    for weight in (0.0, 1.0):
        assert len(Matryoshka(num_classes=4, dim=1, distillation=weight)(output(), LABELS)) == 1


def test_rejects_more_dimensions_than_the_embedding_has() -> None:
    with pytest.raises(UnimetricError, match="at most the embedding dimension 16 in `matryoshka`, got 32"):
        Matryoshka(dims=(32, 8), num_classes=4, dim=16)


def test_a_run_is_evaluated_as_a_whole(config: RunConfig, tmp_path: Path) -> None:
    best = train(from_settings(asdict(config) | {"objective": "matryoshka(dims=(2, 4))", "epochs": 1}), tmp_path / "run", quiet=True)
    assert evaluate(tmp_path / "run")["recall(k=1)"] == pytest.approx(best["test/recall(k=1)"])
