"""The sieve: bounds that hold, neighbours that are the true ones wherever it says so, and an early end where it would not help."""

from __future__ import annotations

import platform
import threading

import pytest
import torch
from torch.nn.functional import normalize

import unimetric.geometry.nearest
import unimetric.geometry.prefilter
from unimetric.geometry.nearest import nearest
from unimetric.geometry.prefilter import _Block, _engine, _scores, applies, code_range, multiplies, prefilter_neighbors


def rejects_signed(engine):
    before, torch.backends.quantized.engine = torch.backends.quantized.engine, engine
    try:
        one = torch._make_per_tensor_quantized_tensor(torch.ones(4, 8, dtype=torch.int8), 0.1, 0)
        torch.ops.quantized.linear(one, torch.ops.quantized.linear_prepack(one, None), 0.1, 0)
        return False
    except RuntimeError as error:
        return "Expected input data type QUInt8" in str(error)
    finally:
        torch.backends.quantized.engine = before


@pytest.fixture(autouse=True)
def products(request, monkeypatch):
    """Eight-bit products of PyTorch, or the float64 products of machines that have none. All run on ARM and on x86 with VNNI."""
    wanted = getattr(request, "param", unimetric.geometry.prefilter._ENGINE)
    if wanted and wanted not in torch.backends.quantized.supported_engines:
        pytest.skip(f"PyTorch has no {wanted} here")
    if wanted == "onednn" and platform.machine() == "x86_64" and not torch.cpu._is_vnni_supported():
        pytest.skip("oneDNN saturates without VNNI")
    if wanted == "qnnpack" and rejects_signed(wanted):
        pytest.skip("QNNPACK of this version of PyTorch rejects signed integers")
    monkeypatch.setattr(unimetric.geometry.prefilter, "_ENGINE", wanted)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    return wanted


ALL = pytest.mark.parametrize("products", ["qnnpack", "onednn", ""], indirect=True, ids=lambda name: name or "float64")


def clustered(count, dim, dice):
    centres = torch.randn(count // 5, dim, generator=dice)[torch.randint(0, count // 5, (count,), generator=dice)]
    return normalize(centres + torch.randn(count, dim, generator=dice), dim=1)


def crowd(kind, count=2603, dim=64):
    dice = torch.Generator().manual_seed(0)
    points = clustered(count, dim, dice)
    if kind == "isotropic":
        return normalize(torch.randn(count, dim, generator=dice), dim=1)
    if kind == "in order":  # each next block brings nearer ones
        return points[points[:, 0].argsort()]
    if kind == "unequal lengths":
        return points * (0.3 * torch.randn(count, 1, generator=dice)).exp()
    if kind == "outlier":
        points[17, 5] = 1.5
    if kind == "zeros":
        points[::50] = 0
    if kind == "only zeros in a block":
        points[:500] = 0
    return points


def every(points):
    """All scores in float64."""
    return (points.double() @ points.double().T).fill_diagonal_(-torch.inf)


def check(points, k, values, places, rows):
    """The same scores, and the same places wherever float32 can tell them from the next."""
    score, place = every(points).topk(k + 1)
    assert torch.allclose(values[rows].double(), score[rows, :k], rtol=0, atol=1e-6)
    gap = score[:, :-1] - score[:, 1:] > 1e-6
    clear = gap & torch.cat([torch.ones(len(points), 1, dtype=torch.bool), gap[:, :-1]], 1)
    assert clear[rows].float().mean() > 0.9
    assert torch.equal(places[rows][clear[rows]], place[:, :k][rows][clear[rows]])


@ALL
@pytest.mark.parametrize("kind", ["clustered", "isotropic", "in order", "unequal lengths", "outlier", "zeros", "only zeros in a block"])
@pytest.mark.parametrize("k, side", [(1, 1024), (6, 300)])
def test_what_is_proven_is_what_a_search_in_float64_finds(kind, k, side):
    points = crowd(kind)
    values, places, proven = prefilter_neighbors(points, k, side=side)
    assert proven.float().mean() > 0.75
    check(points, k, values, places, proven)


# Whole numbers, so that scores are exact in float32, and very many are tied.
@pytest.mark.parametrize("side, copies", [(1000, 1), (256, 4)])
def test_ties_go_to_the_lower_place(side, copies):
    points = torch.randint(-3, 4, (2800 // copies, 64), generator=torch.Generator().manual_seed(0)).float().repeat(copies, 1)
    values, places, proven = prefilter_neighbors(points, 6, side=side)
    score, place = every(points).sort(dim=1, descending=True, stable=True)
    assert proven.float().mean() > 0.9
    assert (score[:, :6] == score[:, 1:7]).any(1).float().mean() > 0.5
    assert torch.equal(values[proven].double(), score[proven, :6])
    assert torch.equal(places[proven], place[proven, :6])


@ALL
def test_copies_tie_though_their_scores_are_rounded():
    points = clustered(1000, 64, torch.Generator().manual_seed(0)).repeat(4, 1)
    _, places, proven = prefilter_neighbors(points, 3, side=512)
    row = torch.arange(4000)
    copies = (row % 1000)[:, None] + torch.arange(0, 4000, 1000)
    others = copies[copies != row[:, None]].view(-1, 3)
    assert proven.float().mean() > 0.9
    assert torch.equal(places[proven], others[proven])


@ALL
@pytest.mark.parametrize("kind", ["clustered", "unequal lengths", "outlier", "zeros"])
@pytest.mark.parametrize("reach", [0.1, 0.5, 2.0])
def test_no_score_is_farther_from_its_code_than_the_doubt(kind, reach):
    points = crowd(kind, count=1200)
    left, right = points[:500], points[500:]
    exact, step = left.double() @ right.double().T, reach / 255
    with _engine():
        one, other = _Block.of(left, 1e-3), _Block.of(right, 1e-3)
        codes = one.codes(other, step)
    dtype, lowest, highest = code_range()
    assert codes.dtype == dtype
    score = step * (codes.double() - lowest)
    low, high = codes == lowest, codes == highest
    assert low.any() and (high.any() or reach == 2)
    for doubt in (one.error_bound(other, step)[:, None], other.error_bound(one, step)[None, :]):
        assert (exact <= score + doubt)[~high].all()
        assert (exact >= score - doubt)[~low].all()
    # A code is the nearest whole number of steps; a doubt allows for twice as much.
    plain = one.scale * one.rounded.double() @ (other.scale * other.rounded.double()).T
    assert (plain - score)[~low & ~high].abs().max() < 0.51 * step


@ALL
def test_all_products_give_the_same_codes(products):
    points = crowd("unequal lengths", count=1200)
    step = 0.5 / 255
    with _engine():
        codes = _Block.of(points[:500], 1e-3).codes(_Block.of(points[500:], 1e-3), step)
    scales = [float(part.abs().max()) / 127 for part in (points[:500], points[500:])]
    whole = [(part.double() / scale).round() for part, scale in zip((points[:500], points[500:]), scales, strict=True)]
    expected = (whole[0] @ whole[1].T * scales[0] * scales[1] / step).round().clamp(0, 255) + code_range()[1]
    # A product halfway between two codes, or an entry halfway between two integers, may be rounded either way.
    assert (codes.double() - expected).abs().max() <= 1
    assert (codes == expected).double().mean() > 0.99


def test_a_pair_has_one_score_wherever_it_stands():
    points = clustered(500, 100, torch.Generator().manual_seed(0))
    one, other = torch.randint(0, 500, (2, 30_000), generator=torch.Generator().manual_seed(1))
    together = _scores(points, one, other)
    assert torch.equal(together, _scores(points, other, one))
    assert torch.equal(
        together[:300], torch.cat([_scores(points, *pair) for pair in zip(one[:300].split(1), other.split(1), strict=False)])
    )


def test_it_ends_early_where_it_would_not_help():
    dice = torch.Generator().manual_seed(0)
    points = clustered(4000, 64, dice)
    wild, lost = points.clone(), points.clone()
    wild[:, 0] = 10  # one coordinate is all that eight bits see
    lost[3, 3] = torch.nan
    collapsed = normalize(torch.ones(4000, 64) + 0.01 * torch.randn(4000, 64, generator=dice), dim=1)
    for none in (wild, lost, collapsed, 0 * points, -torch.inf * points, points[:300], 1e-20 * points):
        assert prefilter_neighbors(none, 6) is None


@ALL
def test_a_library_that_rejects_signed_integers_is_not_used(monkeypatch, products):
    assert multiplies() == bool(products)

    def product(*_):
        raise RuntimeError("Expected input data type QUInt8 but got QInt8")

    monkeypatch.setattr(_Block, "codes", product)
    assert not multiplies() and not applies(torch.zeros(4 * unimetric.geometry.prefilter._SIDE, 64), 12, 1 << 29)


@ALL
def test_it_applies_to_many_points_of_float32_on_some_processors(monkeypatch, products):
    points = torch.zeros(4 * unimetric.geometry.prefilter._SIDE, 64)
    if not products:
        assert not applies(points, 12, 1 << 29)
        return
    assert applies(points, 12, 1 << 29)
    assert not applies(points[1:], 12, 1 << 29)
    assert not applies(points, 33, 1 << 29)
    assert not applies(points, 12, 1 << 26)
    assert not applies(points[:, :63], 12, 1 << 29)
    assert not applies(points.double(), 12, 1 << 29)
    assert not applies(points.to("meta"), 12, 1 << 29)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for able in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda able=able: able)
        assert applies(points, 12, 1 << 29) == able


@ALL
def test_the_engine_of_the_program_is_put_back():
    before = torch.backends.quantized.engine
    try:
        for engine in torch.backends.quantized.supported_engines:
            torch.backends.quantized.engine = engine
            prefilter_neighbors(crowd("isotropic"), 3)
            assert torch.backends.quantized.engine == engine
            with pytest.raises(ZeroDivisionError), _engine():
                _ = 1 / 0
            assert torch.backends.quantized.engine == engine
    finally:
        torch.backends.quantized.engine = before


@ALL
def test_threads_share_the_search_and_their_number_is_restored(monkeypatch, products):
    points, before = crowd("clustered"), torch.get_num_threads()
    plain = prefilter_neighbors(points, 6, side=256, memory=0)
    used = set()
    codes = _Block.codes

    def watched(block, other, step):
        used.add((threading.get_ident(), torch.get_num_threads()))
        return codes(block, other, step)

    monkeypatch.setattr(_Block, "codes", watched)
    try:
        torch.set_num_threads(6)
        shared = prefilter_neighbors(points, 6, side=256, memory=1 << 29)
        assert torch.get_num_threads() == 6
        assert {threads for _, threads in used} == ({1} if products == "onednn" else {6})
        assert (len(used) > 1) == (products == "onednn")
        monkeypatch.setattr(_Block, "codes", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prefilter_neighbors(points, 6, side=256)
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(plain, shared, strict=True))


def test_no_setting_of_the_program_changes_a_score():
    points = crowd("clustered")
    plain = prefilter_neighbors(points, 6, side=1024)
    before = torch.get_default_dtype()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = prefilter_neighbors(points.clone().requires_grad_(), 6, side=1024)
    try:
        torch.set_default_dtype(torch.float64)
        double = prefilter_neighbors(points, 6, side=1024)
    finally:
        torch.set_default_dtype(before)
    with torch.inference_mode():
        inference = prefilter_neighbors(points, 6, side=1024)
    for other in (mixed, double, inference):
        assert all(torch.equal(one, two) for one, two in zip(plain, other, strict=True))


def test_a_search_asks_anew_where_nothing_is_proven(monkeypatch):
    for module in (unimetric.geometry.nearest, unimetric.geometry.prefilter):
        monkeypatch.setattr(module, "_SIDE", 512)
    shares = []

    def watched(points, k, *, barred, memory):
        found = prefilter_neighbors(points, k, barred=barred, memory=memory, side=512)
        shares.append(found and found[2].float().mean().item())
        return found

    monkeypatch.setattr(unimetric.geometry.nearest, "prefilter_neighbors", watched)
    monkeypatch.setattr(unimetric.geometry.nearest, "applies", lambda points, k, memory: True)
    for points in (crowd("zeros"), crowd("outlier"), torch.ones(4000, 64)):
        starts, values, places = zip(*nearest(points, points, 4, own=torch.arange(len(points))), strict=True)
        assert list(starts) == list(range(0, len(points), len(values[0])))
        values, places = torch.cat(values), torch.cat(places)
        if len(points.unique(dim=0)) > 1:
            check(points, 4, values, places, (points != 0).any(1))
        else:
            assert torch.equal(places[4:], torch.arange(4).expand(len(points) - 4, 4))
    assert 0.5 < shares[0] < 1 and 0.5 < shares[1] < 1 and shares[2] is None
