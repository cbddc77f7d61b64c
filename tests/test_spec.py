"""Parts as calls in strings."""

from __future__ import annotations

import pytest

from unimetric.errors import UnimetricError
from unimetric.spec import bind, create, find, kinds, names, parse


def refused(text: str, kind: str = "losses", **offered: object) -> str:
    with pytest.raises(UnimetricError) as caught:
        create(kind, text, **offered)
    return str(caught.value)


def test_a_call_is_read_as_literals_only() -> None:
    assert parse("a.b.C(1, x=-2.5e-3, y=[1, 'two', None])").named == {"x": -2.5e-3, "y": [1, "two", None]}
    for text in ("margin(beta=__import__('os').getcwd())", "margin(beta=1+x)", "margin(**{})", "margin(", "", "1", "margin()()", "f'{1}'"):
        with pytest.raises(UnimetricError):
            parse(text)


def test_every_mistake_says_what_to_type() -> None:
    assert "did you mean `multi_similarity`?" in refused("multi_similarty")
    assert "did you mean `beta`?" in refused("margin(bata=1)")
    assert "`beta` must be a number, got '1.2' in" in refused("margin(beta='1.2')")
    assert "must be true or false, got 1" in refused("triplet(squared=1)")
    assert "must be a list of integers, got 512" in refused("s2sd(dims=512)", "objectives", num_classes=4, dim=4, features=4)
    assert "got ('a',)" in refused("s2sd(dims=('a',))", "objectives", num_classes=4, dim=4, features=4)
    assert "must be a list of 4 numbers, got 1" in refused("diva(weights=1)", "heads", features=4)
    assert "`hidden` must be at least 1" in refused("crt(hidden=0)", "heads", features=4)
    assert "more values" in refused("distance_weighted(1, 2, 3)", "miners")
    assert "given twice" in refused("distance_weighted(0.5, cutoff=0.4)", "miners")
    assert "needs `num_classes`" in refused("arcface", dim=4)
    assert "did you mean `Margin`?" in refused("unimetric.losses.margin.Margn")
    assert "cannot import" in refused("no_such_package.Loss", trust=["no_such_package"])
    assert "reads Pairs, but the miner Semihard gives Triplets" in refused("circle", miner="semihard")


def test_what_the_user_wrote_beats_what_the_run_offers() -> None:
    assert create("heads", "linear(dim=7)", features=3).dim == 7
    _, arguments = bind("heads", "linear(features=5)", features=3)
    assert arguments["features"] == 5
    assert "labels" not in bind("heads", "linear", features=3, labels=(1, 2))[1]


def test_code_outside_is_reached_by_its_dotted_name() -> None:
    assert create("losses", "torch.nn.Linear(4, 2)", trust=["torch"]).out_features == 2


@pytest.mark.parametrize("kind", kinds())
def test_every_file_of_a_kind_defines_what_its_name_says(kind: str) -> None:
    assert names(kind)
    for name in names(kind):
        assert find(kind, name).__doc__


def test_numbers_that_nothing_can_count_with() -> None:
    for text in ("margin(beta=1e999)", "margin(beta=-1e999)", f"margin(beta={10**20})"):
        assert "`beta` must be finite and at most 64 bits long" in refused(text)
    assert "`k` must be" in refused(f"recall(k={2**63})", "metrics")
    assert "`dims` must be" in refused("s2sd(dims=(512, 1e999))", "objectives", num_classes=4, dim=4, features=4)
    for seed in (-1, 2**32):
        assert "`seed` must be from 0 to 4294967295" in refused(f"few_shot(seed={seed})", "splits")


def test_a_miner_is_a_text() -> None:
    assert "`miner` must be a string or a Module or None, got -1 in `circle(miner=-1)`" in refused("circle(miner=-1)")
    assert "`miner` must be a string or a Module, got [] in `rho(miner=[])`" in refused("rho(miner=[])", "miners")
    assert create("miners", "rho", miner=create("miners", "semihard")) is not None


def test_code_that_does_not_say_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIMETRIC_TRUST", "collections")
    assert "`OrderedDict` does not say its arguments" in refused("collections.OrderedDict()", "datasets")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("backbones", "small(channels=7)"),
        ("backbones", "small(channels=0)"),
        ("losses", "histogram(nodes=1)"),
        ("losses", "hyperbolic(curvature=-1)"),
    ],
)
def test_sizes_that_cannot_be_are_refused_when_a_part_is_built(kind: str, text: str) -> None:
    key = text.partition("(")[2]
    assert f"`{key.partition('=')[0]}` must be at least " in refused(text, kind)
    assert f"in `{text}`" in refused(text, kind)
