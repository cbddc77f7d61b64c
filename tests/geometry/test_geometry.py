"""The mathematics that everything stands on, by slow loops in float64."""

from __future__ import annotations

import math

import pytest
import torch

from unimetric.geometry import (
    CounterRNG,
    Memory,
    compare,
    distances,
    draw,
    euclidean,
    exclusion,
    log_sum_exp,
    masked_max,
    masked_mean,
    masked_min,
    seed_dice,
    triplet_hinges,
    uniform,
    unit,
)
from unimetric.spec import create


def batch(count: int = 9, dim: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, dim, generator=generator, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3])[:count]


def test_unit_vectors_have_length_one_and_zero_stays_zero() -> None:
    x = torch.cat([batch()[0], torch.zeros(1, 5, dtype=torch.float64)]).requires_grad_()
    y = unit(x)
    torch.testing.assert_close(y.norm(dim=-1), torch.tensor([1.0] * 9 + [0.0], dtype=torch.float64))
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_compare_is_the_cosine_and_pairs_are_the_labels() -> None:
    z, y = batch()
    similarity, pairs = compare(z, y)
    for a in range(9):
        for b in range(9):
            cosine = float(z[a] @ z[b] / z[a].norm() / z[b].norm())
            assert math.isclose(similarity[a, b].item(), cosine, rel_tol=1e-9, abs_tol=1e-12)
            assert pairs.positive[a, b] == (y[a] == y[b] and a != b)
            assert pairs.negative[a, b] == (y[a] != y[b])
    torch.testing.assert_close(euclidean(similarity, epsilon=0.0), torch.cdist(unit(z), unit(z)), atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(distances(z, z[:4], epsilon=0.0), torch.cdist(z, z[:4]), atol=1e-6, rtol=1e-7)


def test_a_memory_stands_in_for_the_batch_without_its_empty_places_and_without_the_anchor() -> None:
    z, y = batch(4)
    ring = Memory(torch.cat([z, z]), torch.cat([y, y]), torch.tensor([True] * 7 + [False]), torch.tensor([0, 1, 2, 3]))
    similarity, pairs = compare(z, y, ring)
    assert similarity.shape == (4, 8)
    assert not pairs.positive[:, 7].any()
    assert not pairs.negative[:, 7].any()
    assert not pairs.positive[torch.arange(4), torch.arange(4)].any()
    assert pairs.positive[0].tolist() == [False, True, True, False, True, True, True, False]


def test_masked_reductions_give_zero_for_an_empty_row() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False, True], [False, False, False]])
    expected = math.log1p(math.exp(1) + math.exp(3))
    out = torch.nn.functional.softplus(log_sum_exp(values, mask))
    assert math.isclose(out[0].item(), expected, rel_tol=1e-12)
    assert out[1].item() == 0
    out.sum().backward()
    assert (values.grad[1] == 0).all()
    assert values.grad[0, 1] == 0
    assert math.isclose(log_sum_exp(values, mask)[0].item(), math.log(math.exp(1) + math.exp(3)), rel_tol=1e-12)
    assert masked_max(values, mask).tolist() == [3, -math.inf]
    assert masked_min(values, mask).tolist() == [1, math.inf]
    assert masked_mean(values, mask).item() == 2
    assert masked_mean(values, mask & False).item() == 0


@pytest.mark.parametrize("cached", [200, 2**18], ids=["in blocks", "at once"])
@pytest.mark.parametrize("spread", [1, 3], ids=["many positives, sorted", "few, one by one"])
def test_hinges_over_all_triplets_equal_the_triple_loop(cached: int, spread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unimetric.geometry.triplets.CACHED", cached)
    z = torch.randn(9 * spread, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3, *range(4, 9 * spread - 5)])
    similarity, pairs = compare(z, y)
    assert (len(y) >= 2 * 8) == (spread > 1)  # two positives at most: the way that is taken
    far = 2 - 2 * similarity
    total, active, every = triplet_hinges(far, far, pairs, 0.3)
    count = range(len(y))
    terms = [far[a, p] - far[a, n] + 0.3 for a in count for p in count for n in count if pairs.positive[a, p] and pairs.negative[a, n]]
    assert math.isclose(total.item(), sum(max(term.item(), 0) for term in terms), rel_tol=1e-9)
    assert active.item() == sum(term.item() > 0 for term in terms)
    assert every.item() == len(terms)
    (gradient,) = torch.autograd.grad(total, z, retain_graph=True)
    (expected,) = torch.autograd.grad(torch.stack(terms).relu().sum(), z)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("per_class", [1, 4])
@pytest.mark.parametrize("name", ["multi_similarity", "generalized_lifted", "circle", "nt_xent"])
def test_few_positives_taken_together_change_nothing(name: str, per_class: int, monkeypatch: pytest.MonkeyPatch) -> None:
    z = torch.randn(400, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    y = torch.arange(400) // per_class
    loss = create("losses", name)
    taken = loss(z, y)
    (gradient,) = torch.autograd.grad(taken, z)
    monkeypatch.setattr(f"unimetric.losses.{name}.compact_rows", lambda values, mask: (values, mask))
    whole = loss(z, y)
    (expected,) = torch.autograd.grad(whole, z)
    torch.testing.assert_close(taken, whole, rtol=1e-9, atol=0)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_draws_follow_their_weights_and_never_take_a_zero() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]]).repeat(20_000, 1)
    columns, any_ = draw(weights, CounterRNG(3)(20_000))
    assert any_.all()
    assert set(columns.tolist()) == {1, 3}
    assert abs((columns == 3).float().mean().item() - 0.75) < 0.02
    ends = torch.tensor([0.0, 1 - 2**-24])
    assert draw(torch.tensor([[0.0, 1.0, 0.0]] * 2), ends)[0].tolist() == [1, 1]
    assert not draw(torch.zeros(2, 3), ends)[1].any()


def test_dice_are_even_resumable_and_their_own() -> None:
    dice = CounterRNG(5)
    first, second = dice(50_000), dice(50_000)
    for numbers in (first, second):
        counts = torch.histc(numbers, 20, 0, 1)
        assert ((counts - 2500).abs() < 6 * 50).all()  # six standard deviations
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1].item()) < 0.03
    again = CounterRNG(0)
    again.load_state_dict({"state": torch.tensor([5, 1])})
    assert torch.equal(again(50_000), second)
    both = torch.nn.ModuleList([CounterRNG(), CounterRNG()])
    seed_dice(both, 1)
    assert not torch.equal(both[0](10), both[1](10))
    assert uniform(torch.tensor(1), torch.arange(4)).max() < 1


@pytest.mark.parametrize("seed", [0, 7, 3_000_010_007, -5])
def test_dice_on_a_cpu_throw_what_tensors_would(seed: int) -> None:
    dice = CounterRNG(seed)
    for throw in range(3):
        key = torch.tensor(seed) * 0x9E3779B1 + throw * 0x85EBCA6B
        assert torch.equal(dice(500), uniform(torch.arange(500) + (key & 0xFFFFFFFF)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types_stay_as_they_are(dtype: torch.dtype) -> None:
    z, y = batch()
    assert compare(z.to(dtype), y)[0].dtype == dtype


def test_exclusion_equals_a_mask_without_its_cost() -> None:
    values = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[3] = False  # a row without entries
    results = []
    for rivals in ((values + exclusion(values, mask)).logsumexp(-1), log_sum_exp(values, mask)):
        loss = torch.nn.functional.softplus(rivals)
        results.append((loss.detach(), *torch.autograd.grad(loss.sum(), values)))
    torch.testing.assert_close(results[0], results[1])
    assert not results[0][1][~mask].any()
