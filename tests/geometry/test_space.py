"""What a space is given, what it refuses, and that it searches once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import unimetric.geometry.space
from unimetric import metrics
from unimetric.errors import UnimetricError
from unimetric.metrics import Space, explain, interval, measure
from unimetric.spec import names


@pytest.fixture
def searched(monkeypatch):
    """Depth of each search."""
    depths = []
    search = unimetric.geometry.space.nearest

    def counted(*arguments, **options):
        depths.append(arguments[2])
        return search(*arguments, **options)

    monkeypatch.setattr(unimetric.geometry.space, "nearest", counted)
    return depths


def test_one_search_serves_every_metric(crowd, searched):
    embeddings, labels = crowd(pictures=200)
    space = Space(embeddings, labels)
    measure(space, ["recall(k=1)", "map_at_r", "nmi", "spectral_decay", "recall(k=150)", "r_precision", "map_at_k(k=20)", "mrr(k=3)"])
    assert searched == [150]


@pytest.mark.parametrize("classes, depths", [(10, [20]), (2, [1, 99])])
def test_first_search_reaches_the_class_size(crowd, searched, classes, depths):
    """Metrics called one after another share a search, unless the classes are so large that the first would get slow."""
    embeddings, _ = crowd(pictures=200)
    space = Space(embeddings, np.arange(200) % classes)
    metrics.recall(space)
    metrics.map_at_r(space)
    assert searched == depths


def test_hits_that_do_not_fit_are_searched_again_and_agree(crowd):
    embeddings, labels = crowd(pictures=300, classes=2)
    texts = ["recall(k=2)", "map_at_r", "mrr", "precision(k=300)"]
    roomy, tight = Space(embeddings, labels), Space(embeddings, labels, memory=4096)
    assert measure(roomy, texts) == pytest.approx(measure(tight, texts), rel=1e-12)
    assert roomy._held is not None
    assert tight._held is None


def test_neighbours_are_rows_of_the_space(crowd):
    embeddings, labels = crowd(pictures=20)
    query = np.arange(20) < 5
    gallery = np.arange(20) >= 3
    near = Space(embeddings, labels, query, gallery).neighbors(17)
    for row in range(5):
        expected = [number for number in range(3, 20) if number != row]
        assert sorted(near[row].tolist()) == (expected if row < 3 else sorted([-1, *expected]))


@pytest.mark.parametrize("geometry", ["cosine", "euclidean", "inner", "poincare"])
def test_neighbors_have_scores_of_the_geometry(crowd, geometry):
    embeddings, labels = crowd(pictures=20)
    points = embeddings.double() / embeddings.norm(dim=1).max() * 2.5
    near, scores = Space(points, labels, gallery=np.arange(20) >= 3, geometry=geometry, memory=2048).neighbors(17, scores=True)
    unit = torch.nn.functional.normalize(points, dim=1)
    distance = (points[:, None] - points[None]).norm(dim=2)
    square = 1 - 0.1 * points.square().sum(1)
    expected = {
        "cosine": unit @ unit.T,
        "inner": points @ points.T,
        "euclidean": -distance,
        "poincare": -(1 + 0.2 * distance**2 / (square[:, None] * square[None])).acosh() / math.sqrt(0.1),
    }[geometry]
    assert torch.allclose(scores, expected.gather(1, near.clamp_min(0)).where(near >= 0, -torch.inf))
    assert (near[3:, -1] == -1).all() and (scores[:, :-1] >= scores[:, 1:]).all()


def test_numpy_half_precision_and_tensors_alike(crowd):
    embeddings, labels = crowd(pictures=200)
    half = embeddings.half()
    texts = ["recall", "map_at_r", "pi_ratio"]
    assert measure(Space(half, labels), texts) == measure(Space(half.float().numpy(), labels.numpy()), texts)


def test_labels_of_different_sources_never_match():
    points = torch.eye(4)[[0, 0, 1, 1]]
    same = Space(points, np.array([7, 7, 7, 7]), source=np.array([0, 1, 0, 1]))
    assert same.classes == 2
    assert measure(same, ["recall"])["recall"] == 0.0


@pytest.mark.parametrize("rule", ["class", "group"])
def test_numbers_of_groups_may_be_huge(rule: str) -> None:
    """Times the number of classes, they overflow: 2^62 and 0 would be the same group."""
    embeddings, labels = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 4
    group = torch.arange(24) // 4 % 4 - 1
    huge = torch.tensor([0, 2**62, 2**63 - 1])[group].where(group >= 0, -1)
    values = [measure(Space(embeddings, labels, group=each, group_rule=rule), ["recall", "map"]) for each in (group, huge)]
    assert values[0] == values[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embeddings": torch.randn(3)}, "shape"),
        ({"embeddings": torch.tensor([[1.0], [torch.nan], [2.0]])}, "NaN"),
        ({"labels": torch.zeros(2, dtype=torch.int64)}, "one value per embedding"),
        ({"labels": torch.zeros(3)}, "must hold integers"),
        ({"labels": ["boot", "boot", "clog"]}, "`labels` must hold numbers: (.|\n)*return_inverse"),
        ({"group": np.array(["a", "a", "b"])}, "`group` must hold numbers"),
        ({"embeddings": torch.zeros(3, 0)}, "D >= 1"),
        ({"embeddings": torch.eye(3).to(torch.complex64)}, "must be real"),
        ({"query": torch.tensor([0, 1, 2])}, "mask"),
        ({"group": torch.tensor([-1, 0, -5])}, "`group` must be at least 0, or -1 for none, got -5"),
        ({"geometry": "cosin"}, "did you mean `cosine`"),
        ({"geometry": "poincare", "embeddings": torch.full((3, 2), 4.0)}, "inside the Poincaré ball"),
        ({"geometry": "poincare", "curvature": 0.0}, "`curvature` must be above 0, got 0.0"),
        ({"embeddings": [torch.ones(2)] * 3}, "`embeddings` must hold numbers: (.|\n)*stack"),
        ({"embeddings": ["a.jpg", "b.jpg", "c.jpg"]}, "`embeddings` must hold numbers"),
        ({"source": torch.tensor([0, -1, 0])}, "`source` must be from 0 to 65535, got -1 to 0"),
        ({"source": torch.tensor([0, 10**15, 0])}, "`source` must be from 0 to 65535, got 0 to 1000000000000000(.|\n)*return_inverse"),
        ({"source": torch.tensor([0, 1, 2]), "source_names": ["cub", "cars"]}, "`source` must be from 0 to 1, got 0 to 2"),
        ({"source": torch.tensor([0, 1, 1]), "source_names": ["cub", "cub"]}, "`source_names` must be different, got cub, cub"),
    ],
)
def test_mistakes_are_named(change, message):
    good = {"embeddings": torch.eye(3), "labels": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(UnimetricError, match=message):
        Space(**{**good, **change})


def test_no_neighbours_are_an_error_not_a_zero(crowd):
    with pytest.raises(UnimetricError, match="k=0"):
        measure(Space(*crowd()), ["recall(k=0)"])


@pytest.mark.parametrize("metric", ["recall", "map_at_r", "r_precision", "map_at_k(k=3)"])
def test_nothing_to_find_is_an_error_not_a_nan(metric: str):
    with pytest.raises(UnimetricError, match="none of 3 queries"):
        measure(Space(torch.eye(3), torch.arange(3)), [metric])


def test_every_text_is_read_before_anything_is_computed(crowd):
    space = Space(*crowd())
    with pytest.raises(UnimetricError, match="recall"):
        measure(space, ["map_at_r", "recal"])
    assert space._held is None


@pytest.mark.parametrize("name", names("metrics"))
def test_every_metric_is_finite_and_says_what_it_is(crowd, name):
    embeddings, labels = crowd()
    labels[:3] = torch.tensor([50, 51, 52])
    for space in (Space(embeddings, labels, source=(labels > 3).long()), Space(torch.ones(9, 3), torch.arange(9) // 2)):
        assert all(np.isfinite(value) for value in measure(space, [name]).values())
    assert explain(name).endswith(".")
    assert len(explain(name)) < 160


def test_an_interval_holds_the_value_and_narrows_with_more_classes(crowd):
    few, many = (Space(*crowd(pictures=10 * classes, classes=classes, spread=1.5)) for classes in (10, 200))
    widths = {}
    for method in ("bootstrap", "wilson"):
        for name, space in (("few", few), ("many", many)):
            low, high = interval(space, "recall(k=1)", method=method, draws=200)
            assert 0 <= low < measure(space, ["recall(k=1)"])["recall(k=1)"] < high <= 1
            widths[method, name] = high - low
        assert widths[method, "many"] < widths[method, "few"] / 2
    low, high = interval(many, "map_at_r", draws=200)
    assert low < measure(many, ["map_at_r"])["map_at_r"] < high


def test_wilson_is_wilson():
    # 8 of 10: 0.4901 to 0.9433 (Brown, Cai and DasGupta 2001 give the formula).
    points = torch.eye(8, dtype=torch.float64)
    embeddings = torch.cat([points[[0, 0, 1, 1, 2, 2, 3, 3]], points[[4, 5]]])
    low, high = interval(Space(embeddings, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])), "recall", method="wilson")
    assert (low, high) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("nmi", {}, "mean over queries"),
        ("map_at_r", {"method": "wilson"}, "fraction of queries"),
        ("recall", {"method": "bayes"}, "unknown interval method `bayes`"),
        ("recall", {"level": 95}, "`level` must be above 0 and below 1, got 95"),
    ],
)
def test_no_interval_where_none_holds(crowd, text, options, message):
    with pytest.raises(UnimetricError, match=message):
        interval(Space(*crowd()), text, **options)


def test_one_text_is_not_a_list_of_metrics(crowd) -> None:
    with pytest.raises(UnimetricError, match="use `\\['recall', 'nmi'\\]`"):
        measure(Space(*crowd()), "recall; nmi")


def test_junk_may_be_a_tensor(crowd, recwarn: pytest.WarningsRecorder) -> None:
    points, labels = crowd()
    assert len(Space(points, labels, junk=labels[:1]).query) == len(Space(points, labels, junk=[int(labels[0])]).query)
    assert not recwarn.list


@pytest.mark.parametrize(
    ("dtype", "exponent"), [*((torch.float32, each) for each in (-35, -8, 30)), *((torch.float64, each) for each in (-300, -8, 300))]
)
def test_cosine_space_accepts_every_length(dtype: torch.dtype, exponent: int) -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(60, 6, generator=generator, dtype=dtype)
    labels = torch.arange(60) // 3
    points[:30] += 3 * points[:30].mean(1, keepdim=True)
    scales = torch.ones(60, 1, dtype=dtype)
    scales[::2] = 10.0**exponent
    space, scaled = Space(points, labels), Space(points * scales, labels)
    assert torch.allclose(scaled.points, space.points, atol=1e-5)
    assert torch.equal(scaled.points[1::2], space.points[1::2])  # ordinary lengths are not changed
    assert torch.equal(scaled.neighbors(3), space.neighbors(3))


@pytest.mark.parametrize("geometry", ["euclidean", "inner"])
def test_points_whose_squares_overflow_have_the_same_neighbors(crowd, geometry: str) -> None:
    points, labels = crowd()
    space, large = (Space(each, labels, geometry=geometry) for each in (points.float(), points.float() * 2.0**66))
    (near, scores), (found, more) = (each.neighbors(5, scores=True) for each in (space, large))
    assert torch.equal(near, found)
    assert torch.allclose(scores.double() * 2.0 ** (66 if geometry == "euclidean" else 132), more)


def test_counts_of_very_deep_neighbors() -> None:
    space = Space(torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) // 2)
    for k in (19, 20, 2**31 - 1, 2**31, 2**63 - 1):
        assert metrics.recall(space, k=k) == 1.0
        assert metrics.map_at_k(space, k=k) == metrics.map_at_k(space, k=19)


def test_spectrum_of_equal_points_has_one_value() -> None:
    points = torch.linspace(0.1, 0.3, 32).expand(24, 32).contiguous()
    values = Space(points, torch.zeros(24, dtype=torch.int64)).spectrum()
    assert values[0].item() == pytest.approx(24**0.5) and not values[1:].any()  # of unit vectors


def test_unit_points_are_not_copied() -> None:
    points = torch.nn.functional.normalize(torch.randn(60, 8, generator=torch.Generator().manual_seed(0)))
    assert Space(points, torch.arange(60) // 3).points.data_ptr() == points.data_ptr()
    assert Space(2 * points, torch.arange(60) // 3).points.data_ptr() != points.data_ptr()


def test_consecutive_and_scattered_galleries_give_the_same_neighbors() -> None:
    points, labels = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 6
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    query = torch.arange(60) < 20
    together = Space(points, labels, query, ~query)
    scattered = Space(points[order], labels[order], query[order], ~query[order])
    assert torch.allclose(together.nearest()[1].sort().values, scattered.nearest()[1].sort().values, atol=1e-6)
    assert together.queries == scattered.queries == 20
