"""Losses that compare with the classes of the batch and a random sample of the others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from unimetric.geometry import seed_dice
from unimetric.losses import ArcFace, CosFace, CurricularFace, NormalizedSoftmax
from unimetric.spec import create

LOSSES = {"arcface": ArcFace, "cosface": CosFace, "curricularface": CurricularFace, "normalized_softmax": NormalizedSoftmax}
CLASSES, DIM, LABELS = 40, 6, torch.tensor([31, 2, 2, 17, 38, 31])


def build(name: str, negatives: float = 0.3, **options: float) -> torch.nn.Module:
    torch.manual_seed(0)
    return LOSSES[name](num_classes=CLASSES, dim=DIM, negatives=negatives, **options).double()


def embeddings() -> Tensor:
    return torch.randn(len(LABELS), DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def naive(name: str, z: Tensor, labels: list[int], proxies: dict[int, Tensor]) -> float:
    """The equation of each loss with loops, over some classes."""
    total = 0.0
    cosines = [{c: float(x @ p / x.norm() / p.norm()) for c, p in proxies.items()} for x in z]
    mean = sum(row[y] for row, y in zip(cosines, labels, strict=True)) / len(labels)
    for row, y in zip(cosines, labels, strict=True):
        turned = math.cos(math.acos(row[y]) + 0.5)
        if name == "arcface":
            logits = {c: 16 * (turned if c == y else value) for c, value in row.items()}
        elif name == "cosface":
            logits = {c: 64 * (value - 0.35 * (c == y)) for c, value in row.items()}
        elif name == "normalized_softmax":
            logits = {c: value / 0.05 for c, value in row.items()}
        else:
            own = turned if row[y] > math.cos(math.pi - 0.5) else row[y] - math.sin(math.pi - 0.5) * 0.5
            hard = {c: value * (0.01 * mean + value) if value > turned else value for c, value in row.items()}
            logits = {c: 64 * (own if c == y else value) for c, value in hard.items()}
        total += math.log(sum(math.exp(value - logits[y]) for value in logits.values()))
    return total / len(labels)


@pytest.mark.parametrize("name", LOSSES)
def test_sampled_loss_is_its_equation_over_the_sample(name: str) -> None:
    loss, z = build(name), embeddings().requires_grad_()
    value = loss(z, LABELS)
    value.backward()
    used = loss.proxies.grad.abs().sum(1).nonzero()[:, 0].tolist()
    assert len(used) == 12 and set(LABELS.tolist()) <= set(used)  # 0.3 of 40 classes
    proxies = {c: loss.proxies.detach()[c] for c in used}
    assert value.item() == pytest.approx(naive(name, z.detach(), LABELS.tolist(), proxies), rel=1e-9)
    full = build(name, 1.0)
    assert not math.isclose(full(z, LABELS).item(), value.item(), rel_tol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_that_of_a_loss_with_only_the_sampled_classes(name: str) -> None:
    loss, z = build(name), embeddings().requires_grad_()
    loss(z, LABELS).backward()
    used = loss.proxies.grad.abs().sum(1).nonzero()[:, 0]
    small, same = LOSSES[name](num_classes=len(used), dim=DIM).double(), embeddings().requires_grad_()
    small.proxies.data = loss.proxies.data[used]
    small(same, torch.searchsorted(used, LABELS)).backward()
    assert torch.equal(z.grad, same.grad) and torch.equal(loss.proxies.grad[used], small.proxies.grad)


def test_draws_are_even_differ_and_resume() -> None:
    loss, z = build("cosface"), embeddings()
    counts = torch.zeros(CLASSES)
    for _ in range(400):
        loss.proxies.grad = None
        loss(z, LABELS).backward()
        counts += loss.proxies.grad.abs().sum(1) > 0
    others = counts[[c for c in range(CLASSES) if c not in LABELS]]
    assert (counts[LABELS] == 400).all() and others.sum() == 400 * (12 - 4)
    assert others.min() > 50 and others.max() < 130  # the mean is 89 of 400, its standard deviation about 8
    again = build("cosface")
    again.load_state_dict(loss.state_dict())
    assert again(z, LABELS) == loss(z, LABELS) != loss(z, LABELS)
    seed_dice(again, 7)
    again.sample.dice.state[1] = loss.sample.dice.state[1]
    assert again(z, LABELS) != loss(z, LABELS)


def test_evaluation_and_default_use_all_classes() -> None:
    z = embeddings()
    for name in LOSSES:
        sampled, full = build(name), build(name, 1.0)
        assert torch.equal(sampled.eval()(z, LABELS), full.eval()(z, LABELS))
        assert sampled.state_dict().keys() - full.state_dict().keys() == {"sample.dice.state"}
    few = build("arcface", 0.0)
    few(z, LABELS).backward()
    assert (few.proxies.grad.abs().sum(1) > 0).sum() == len(LABELS)  # at least as many classes as images


def test_argument_is_a_fraction() -> None:
    assert create("losses", "arcface(negatives=0.1)", num_classes=9, dim=2, batch_size=4).sample.fraction == 0.1
    with pytest.raises(Exception, match="negatives"):
        create("losses", "arcface(negatives=1.5)", num_classes=9, dim=2, batch_size=4)
