"""The search: exact, in any chunks, with ties by column and oneself left out."""

from __future__ import annotations

import pytest
import torch

import unimetric.geometry.nearest
from unimetric.geometry.nearest import best, exactly, mutual, nearest, sort_by_value


def everything(asking, answering, k, **options):
    starts, values, columns = zip(*nearest(asking, answering, k, **options), strict=True)
    assert list(starts) == [sum(len(part) for part in values[:number]) for number in range(len(values))]
    return torch.cat(values), torch.cat(columns)


def slowly(score, k, own=None):
    """By a sort of (-score, column), a row at a time."""
    values, columns = [], []
    for row, scores in enumerate(score.tolist()):
        allowed = [column for column in range(len(scores)) if own is None or own[row] != column]
        order = sorted(allowed, key=lambda column, scores=scores: (-scores[column], column))[:k]
        values.append([scores[column] for column in order] + [-torch.inf] * (k - len(order)))
        columns.append(order + [-1] * (k - len(order)))
    return torch.tensor(values, dtype=score.dtype), torch.tensor(columns)


# Whole numbers, so that products are exact, most scores are tied, and every way of chunking gives the same ones.
@pytest.mark.parametrize("k", [1, 2, 7, 30, 200, 699, 700])
@pytest.mark.parametrize("memory", [1 << 8, 1 << 17, 1 << 29])
def test_ties_go_to_the_lower_column_in_any_chunks(k, memory):
    dice = torch.Generator().manual_seed(k)
    asking = torch.randint(-2, 3, (12, 3), generator=dice).float()
    answering = torch.randint(-2, 3, (700, 3), generator=dice).float()
    own = torch.randint(-1, 700, (12,), generator=dice)
    values, columns = everything(asking, answering, k, own=own, memory=memory)
    expected_values, expected_columns = slowly(asking @ answering.T, k, own.tolist())
    assert torch.equal(values, expected_values)
    assert torch.equal(columns, expected_columns)


@pytest.mark.parametrize("k", [1, 5, 40])
@pytest.mark.parametrize("count", [300, 321])
def test_half_the_products_find_the_same(k, count):
    dice = torch.Generator().manual_seed(k)
    tied = torch.randint(-2, 3, (count, 3), generator=dice).float()
    # Sorted, so that each next block brings better ones than all that is held, for some rows.
    sorted_ = torch.nn.functional.normalize(torch.randn(count, 4, generator=dice), dim=1).double()
    sorted_ = sorted_[sorted_[:, 0].argsort()]
    for points in (tied, sorted_, torch.ones(count, 2)):
        plain = everything(points, points.clone(), k, own=torch.arange(count))
        for side in (32, 128, 512):
            starts, values, columns = zip(*mutual(points, k, side=side), strict=True)
            assert list(starts) == list(range(0, count, side))
            assert torch.equal(torch.cat(columns), plain[1])
            assert torch.allclose(torch.cat(values), plain[0], rtol=1e-12)


def test_half_the_products_are_taken_where_everyone_asks(monkeypatch):
    monkeypatch.setattr(unimetric.geometry.nearest, "_SIDE", 128)
    taken = []
    monkeypatch.setattr(
        unimetric.geometry.nearest, "mutual", lambda *arguments, side, **rest: taken.append(side) or mutual(*arguments, side=side, **rest)
    )
    points = torch.randn(300, 8, dtype=torch.float64)
    everyone = torch.arange(300)
    for asking, own in ((points, everyone), (points[:299], everyone[:299]), (points, everyone.flip(0)), (points, None)):
        expected = slowly(asking @ points.T, 4, None if own is None else own.tolist())[1]
        assert torch.equal(everything(asking, points, 4, own=own)[1], expected)
    assert taken == [64]


def test_few_neighbors_need_no_full_search_of_a_block(monkeypatch):
    """Only the first row of blocks has no thresholds yet. A search for the nearest one must not take longer than for twelve."""
    searched = []

    def counted(score, k):
        searched.append(score.shape)
        return best(score, k)

    monkeypatch.setattr(unimetric.geometry.nearest, "best", counted)
    points = torch.randn(1024, 8, generator=torch.Generator().manual_seed(0))
    assert len(list(mutual(points, 1, side=128))) == 8
    assert len(searched) == 8


def test_a_collapsed_space_is_found_in_order():
    points = torch.ones(500, 4)
    _, columns = everything(points[:5], points, 3, own=torch.arange(5))
    assert columns.tolist() == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("columns", [9, 33, 500, 5000])
@pytest.mark.parametrize("k", [1, 5, 9])
def test_best_is_the_head_of_a_stable_sort(columns, k):
    score = torch.randn(6, columns, generator=torch.Generator().manual_seed(columns)).mul(50).round()
    values, places = best(score, k)
    order = score.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, order.values[:, :k])
    assert torch.equal(places, order.indices[:, :k])


def test_values_in_any_order_are_sorted_and_ties_ascend():
    dice = torch.Generator().manual_seed(0)
    score = torch.randn(6, 90, generator=dice).mul(5).round()
    score[2, 10:] = -torch.inf
    shuffled = torch.rand(6, 90, generator=dice).argsort(1)
    values, places = sort_by_value(score.gather(1, shuffled), shuffled)
    order = score.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, order.values)
    assert torch.equal(places, order.indices)


def test_best_finds_a_large_k_by_smaller_tiles():
    score = torch.randn(3, 2000, generator=torch.Generator().manual_seed(0))
    score[1] = score[1].round()
    values, places = best(score, 100)
    order = score.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, order.values[:, :100])
    assert torch.equal(places, order.indices[:, :100])


def test_the_memory_holds():
    asking, answering = torch.randn(1000, 8), torch.randn(9000, 8)
    for memory in (1 << 20, 1 << 22):
        sizes = [len(values) for _, values, _ in nearest(asking, answering, 10, memory=memory)]
        assert 4 * max(sizes) * 9000 <= memory or max(sizes) <= 128


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so
def test_no_setting_of_the_program_changes_a_score():
    dice = torch.Generator().manual_seed(0)
    asking, answering = torch.randn(64, 128, generator=dice), torch.randn(256, 128, generator=dice)
    plain = everything(asking, answering, 20)
    matmul, cuda = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    before = matmul.fp32_precision, cuda.fp32_precision
    try:
        matmul.fp32_precision, cuda.fp32_precision = "bf16", "tf32"
        with torch.autocast("cpu", torch.bfloat16):
            inside = everything(asking, answering, 20)
            with exactly(torch.device("cpu")):
                assert (matmul.fp32_precision, cuda.fp32_precision) == ("ieee", "ieee")
                assert (asking @ answering.T).dtype == torch.float32
            assert torch.mm(asking[:1], answering[:1].T).dtype == torch.bfloat16
        assert (matmul.fp32_precision, cuda.fp32_precision) == ("bf16", "tf32")
    finally:
        matmul.fp32_precision, cuda.fp32_precision = before
    assert torch.equal(plain[0], inside[0])
    assert torch.equal(plain[1], inside[1])
