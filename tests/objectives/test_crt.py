"""The objective of the coded residual transform: each term is its equation; and it learns."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.conftest import read_log

from unimetric.config import load
from unimetric.errors import UnimetricError
from unimetric.objectives import Output
from unimetric.spec import create
from unimetric.training.loop import train

LABELS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3])
LOW, HIGH = 4, 6


def build(text: str = "crt", head: str | None = "crt(dim=4, hidden=6, prototypes=5, low_prototypes=3)", **offered):
    torch.manual_seed(0)
    objective = create("objectives", text, num_classes=4, branches=(LOW, HIGH), **offered)
    if head is not None:
        built = create("heads", head, features=7).double()
        objective.meet(SimpleNamespace(head=built))
    return objective.double()


def output() -> Output:
    torch.manual_seed(1)
    first = torch.randn(len(LABELS), LOW, dtype=torch.float64, requires_grad=True)
    second = torch.randn(len(LABELS), HIGH, dtype=torch.float64, requires_grad=True)
    return Output(first, first[:, None], first[:, :3, None, None], (first, second))


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def naive_multi_similarity(z: torch.Tensor, labels: torch.Tensor) -> float:
    """Wang et al. 2019 with 2, 40, 0.5 and 0.1, over the batch: an anchor without kept pairs adds nothing."""
    total = 0.0
    for i in range(len(z)):
        similarity = {j: cosine(z[i], z[j]) for j in range(len(z)) if j != i}
        positive = [s for j, s in similarity.items() if labels[j] == labels[i]]
        negative = [s for j, s in similarity.items() if labels[j] != labels[i]]
        if not positive or not negative:
            continue
        kept_positive = [s for s in positive if s - 0.1 < max(negative)]
        kept_negative = [s for s in negative if s + 0.1 > min(positive)]
        if not kept_positive or not kept_negative:
            continue
        total += math.log(1 + sum(math.exp(-2 * (s - 0.5)) for s in kept_positive)) / 2
        total += math.log(1 + sum(math.exp(40 * (s - 0.5)) for s in kept_negative)) / 40
    return total / len(z)


def naive_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    rows = range(len(first))
    return sum(abs(cosine(first[i], first[j]) - cosine(second[i], second[j])) for i in rows for j in rows)


def naive_likeness(prototypes: torch.Tensor) -> float:
    rows = range(len(prototypes))
    total = sum(abs(cosine(prototypes[k], prototypes[j])) for k in rows for j in rows if k != j)
    return total / (len(rows) * (len(rows) - 1))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("reduction", "divide"), [("mean", len(LABELS) ** 2), ("row", len(LABELS)), ("sum", 1)])
def test_terms_are_their_equations(reduction: str, divide: int, shared: bool) -> None:
    objective = build(f"crt(reduction='{reduction}')", f"crt(dim=4, hidden=6, prototypes=5, low_prototypes=3, shared={shared})")
    given = output()
    first, second = given.branches
    with torch.no_grad():
        expected = {
            "loss": naive_multi_similarity(first, LABELS),
            "high": 0.1 * naive_multi_similarity(second, LABELS),
            "consistency": 0.9 * naive_difference(first, second) / divide,
            "diversity": sum(naive_likeness(prototypes) for prototypes in objective.heads[0].prototype_sets),
        }
    terms = {name: term.item() for name, term in objective(given, LABELS).items()}
    assert terms == pytest.approx(expected, rel=1e-9)


def test_equal_spaces_are_consistent_and_orthogonal_prototypes_are_diverse() -> None:
    objective = build(head="crt(prototypes=4, dim=4, hidden=6, init='orthogonal')")
    given = output()
    first = given.branches[0]
    padded = torch.nn.functional.pad(3 * first, (0, HIGH - LOW))  # other numbers, the same angles
    terms = objective(Output(first, given.tokens, given.images, (first, padded)), LABELS)
    assert terms["consistency"].item() == pytest.approx(0, abs=1e-12)
    assert terms["diversity"].item() == pytest.approx(0, abs=1e-6)
    assert build(head="crt(prototypes=1, dim=4, hidden=6)")(given, LABELS)["diversity"].item() == 0


def test_who_learns_from_the_difference() -> None:
    for detach, learns in ((False, True), (True, False)):
        given = output()
        build(f"crt(detach_high={detach})")(given, LABELS)["consistency"].backward()
        first, second = given.branches
        assert first.grad.abs().sum() > 0
        assert (second.grad is not None and bool(second.grad.abs().sum() > 0)) is learns


def test_diversity_reaches_the_prototypes_which_stay_the_heads() -> None:
    objective = build()
    (prototypes,) = objective.heads[0].prototype_sets
    objective(output(), LABELS)["diversity"].backward()
    assert prototypes.grad.abs().sum() > 0
    assert not list(objective.parameters())
    assert not objective.state_dict()


def test_a_weight_of_zero_leaves_a_term_out() -> None:
    objective = build("crt(high=0, consistency=0, diversity=0)", head="linear(dim=4)")  # no prototypes are needed then
    assert list(objective(output(), LABELS)) == ["loss"]


def test_any_loss_may_stand_in_once_for_each_branch() -> None:
    objective = build(loss="proxy_anchor", miner=None)
    assert sorted(tuple(parameter.shape) for parameter in objective.parameters()) == [(4, LOW), (4, HIGH)]
    sum(objective(output(), LABELS).values()).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in objective.parameters())


def test_captures_as_one_graph_with_its_prototypes() -> None:
    objective, given = build(), output()
    torch._dynamo.reset()
    terms = torch.compile(objective, fullgraph=True, backend="aot_eager")(given, LABELS)
    for name, term in objective(given, LABELS).items():
        assert terms[name].item() == pytest.approx(term.item(), rel=1e-9)
    (prototypes,) = objective.heads[0].prototype_sets
    terms["diversity"].backward()
    assert prototypes.grad.abs().sum() > 0


@pytest.mark.parametrize("shared", [True, False])
def test_prototypes_start_at_cluster_centers(shared: bool) -> None:
    objective = build("crt(start='kmeans')", f"crt(dim=4, hidden=6, prototypes=5, low_prototypes=3, shared={shared})")
    head, given = objective.heads[0], output()
    centers = 4 * torch.randn(5 if shared else 3, 7, generator=torch.Generator().manual_seed(0)).double()
    spread = 0.1 * torch.randn(len(LABELS), 13, 7, generator=torch.Generator().manual_seed(1)).double()
    tokens = centers[torch.arange(len(LABELS) * 13) % len(centers)].view(len(LABELS), 13, 7) + spread
    assert objective.reads == ("tokens",)
    for step in range(2):
        objective.begin()
        objective(replace(given, tokens=tokens + step), LABELS)
        objective.stepped()
        positions = tokens[:, 1:].flatten(0, 1)
        for prototypes in head.prototype_sets:  # each is the mean of the positions nearest to it, those of the first batch
            nearest = torch.cdist(positions, prototypes).argmin(1)
            means = torch.stack([positions[nearest == number].mean(0) for number in range(len(prototypes))])
            torch.testing.assert_close(prototypes.detach(), means)
    assert objective.reads == () and not objective.waiting
    resumed = build("crt(start='kmeans')")
    resumed.load_state_dict(objective.state_dict())
    resumed.begin()
    assert not resumed.waiting and "started" not in build().state_dict()


def test_says_which_head_it_needs() -> None:
    with pytest.raises(UnimetricError, match="two branches, got 1"):
        create("objectives", "crt", num_classes=4, branches=(8,))
    with pytest.raises(UnimetricError, match="the head Linear has none"):
        build(head="linear(dim=4)")
    with pytest.raises(UnimetricError, match="has none"):
        build(head="crt(dim=4, hidden=6, coded=False)")
    with pytest.raises(UnimetricError, match="`reduction` must be one of `mean`, `row`, `sum`, got 'all'"):
        build("crt(reduction='all')")


@pytest.mark.parametrize(
    ("head", "objective"), [("", "crt"), (", init='kaiming', nested=True, class_token=True, prototype_lr=1e-3", "crt(start='kmeans')")]
)
def test_it_learns(tmp_path: Path, head: str, objective: str) -> None:
    config = load(
        dataset="glyphs(blocks=['armenian', 'georgian'])",
        transform="glyphs",
        backbone="small(channels=32)",
        head=f"crt(dim=32, hidden=64, prototypes=8{head})",
        objective=objective,
        loss="multi_similarity(kept_only=False)",
        sampler="samples_per_class(n=4)",
        batch_size=64,
        optimizer="adam(lr=3e-3)",
        epochs=4,
        evaluate_every=4,
        logger="none",
        device="cpu",
    )
    train(config, tmp_path / "run", quiet=True)
    lines = read_log(tmp_path / "run")
    before, after = lines[0]["test/recall(k=1)"], lines[-1]["test/recall(k=1)"]
    assert after > 1.5 * before, f"{before:.3f} -> {after:.3f}"
    assert head or lines[-1]["term/diversity"] < lines[1]["term/diversity"]


def test_more_prototypes_than_positions_are_named() -> None:
    objective = build("crt(start='kmeans')", "crt(dim=4, hidden=6, prototypes=500)")
    objective(replace(output(), tokens=torch.randn(len(LABELS), 13, 7, dtype=torch.float64)), LABELS)
    with pytest.raises(UnimetricError, match=r"`prototypes` must be at most .* got 500 prototypes and \d+ positions"):
        objective.stepped()
