"""Parts as calls in strings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unimetric.config import load
from unimetric.errors import UnimetricError
from unimetric.spec import KINDS, OFFERED, bind, bind_arguments, create, find, names, parse, trusting


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


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of one's own with a dataset, a sampler and a metric."""
    (tmp_path / "mine_of_spec.py").write_text(
        "class Made:\n    def __init__(self, value):\n        self.value = value\n\n"
        "def shoes(root, size=3):\n    return Made((root, size))\n\n"
        "def rows(labels, n=2):\n    return Made((labels, n))\n\n"
        "def hits(space, k=1):\n    return float(k)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "mine_of_spec"
    sys.modules.pop("mine_of_spec", None)


def test_functions_without_inputs_need_no_keyword_only(mine: str) -> None:
    assert create("datasets", f"{mine}.shoes(root='cub')", trust=[mine]).value == ("cub", 3)
    assert create("datasets", f"{mine}.shoes('cub', size=4)", trust=[mine]).value == ("cub", 4)
    assert create("samplers", f"{mine}.rows(n=4)", trust=[mine], labels=(1, 2)).value == ((1, 2), 4)
    with pytest.raises(UnimetricError, match=r"needs `root`"):
        create("datasets", f"{mine}.shoes", trust=[mine])
    with trusting(mine), pytest.raises(UnimetricError, match="has no argument `k`") as error:
        bind("metrics", f"{mine}.hits(k=2)")  # `space` is an input, so `k` may be one
    assert error.value.hint == "make it keyword-only: `def hits(..., *, k)`"


def test_a_miner_is_a_text() -> None:
    assert "`miner` must be a string or a Module or None, got -1 in `circle(miner=-1)`" in refused("circle(miner=-1)")
    assert "`miner` must be a string or a Module, got [] in `rho(miner=[])`" in refused("rho(miner=[])", "miners")
    assert create("miners", "rho", miner=create("miners", "semihard")) is not None


def test_built_components_take_no_arguments() -> None:
    built = create("losses", "triplet")
    assert create("losses", built, miner=None) is built
    for given in ({"miner": "hardest"}, {"margin": 0.3}):
        with pytest.raises(UnimetricError, match=f"`Triplet` is already built, and `{next(iter(given))}` would change nothing") as caught:
            create("losses", built, **given)
        assert "spec string" in caught.value.hint


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


@pytest.mark.parametrize(
    ("kind", "text", "hint"),
    [
        ("metrics", "recall@1", "write `recall(k=1)`"),
        ("metrics", "R@10", "write `recall(k=10)`"),
        ("metrics", "precision@5", "write `precision(k=5)`"),
        ("metrics", "map@r", "write `map_at_r`"),
        ("metrics", "mAP@R", "write `map_at_r`"),
        ("metrics", "mAP@1000", "write `map_at_k(k=1000)`"),
        ("metrics", "recall(k=1), map_at_r", "separate several with semicolons: `recall(k=1); map_at_r`"),
        ("metrics", "recall(k=1),map_at_k(k=10)", "separate several with semicolons: `recall(k=1); map_at_k(k=10)`"),
        ("backbones", "resnet50", "a network of timm is written as `timm(name='resnet50')`"),
        ("backbones", "vit_small_patch14_dinov2.lvd142m", "`timm(name='vit_small_patch14_dinov2.lvd142m')`"),
        ("datasets", "images", "write `folder(root='images')`"),
        ("datasets", "./images", "write `folder(root='./images')`"),
        ("datasets", "cub.pack", "write `pack(path='cub.pack')`"),
        ("datasets", "data/cub.pack", "write `pack(path='data/cub.pack')`"),
        ("datasets", "birds.csv", "write `csv(file='birds.csv')`"),
        ("loss", "margin", "did you mean `losses`?"),
        ("metric", "recall", "did you mean `metrics`?"),
    ],
)
def test_hints_name_what_to_type(kind: str, text: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "images").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnimetricError) as caught:
        create(kind, text)
    assert hint in caught.value.hint
    if "; " not in hint and kind in KINDS:
        suggested = caught.value.hint.rpartition("`")[0].rpartition("`")[2]
        assert bind_arguments(kind, suggested) is not None


@pytest.mark.parametrize("text", ["a" + ".a" * 700, "a" + ".a" * 5_000, "a" + ".a" * 100_000, f"margin(beta={'-' * 5_000}1)", "(" * 5_000])
def test_deep_spec_strings_are_errors(text: str) -> None:
    for kind in ("losses", "datasets", "backbones"):
        message = refused(text, kind)
        assert len(message) < 1_000


def test_dotted_names_may_be_long() -> None:
    assert parse("a" + ".b" * 800).name == "a" + ".b" * 800


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("metrics", "per_source(metric='per_source')", "`metric` must return one value, but `per_source` returns several"),
        ("metrics", "harmonic(metric='class_spectra(top=2)')", "`metric` must return one value"),
        ("metrics", "per_source(metric='recal')", "no `recal` in metrics (in `per_source(metric='recal')`)"),
        ("metrics", "per_source(metric='recall(k=0)')", "`k` must be at least 1, got 0 in `recall(k=0)`"),
        ("losses", "margin(miner='semihar')", "no `semihar` in miners"),
        ("miners", "rho(miner='semihard(margin=-1)')", "`margin` must be"),
        ("objectives", "diva(auxiliary='margn')", "no `margn` in losses"),
        ("datasets", "union(parts=['glyphs', 'glyps'])", "no `glyps` in datasets"),
    ],
)
def test_inner_spec_strings_are_checked(kind: str, text: str, says: str) -> None:
    with pytest.raises(UnimetricError) as caught:
        bind_arguments(kind, text, **OFFERED)
    assert says in caught.value.message and text in caught.value.message and caught.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer", "adam(lr=-1)"),
        ("schedule", "step(every=0)"),
        ("head", "linear(dim=0)"),
        ("loss", "nt_xent(temperature=0)"),
        ("metrics", "recall(k=0)"),
        ("metrics", "recall(k=1); per_source(metric='per_source')"),
        ("precision", "banana"),
        ("device", "banana"),
        ("strategy", "banana"),
    ],
)
def test_settings_that_cannot_run_are_rejected_when_loaded(key: str, value: str) -> None:
    with pytest.raises(UnimetricError, match=f"^settings: `?{key}") as caught:
        load(**{key: value})
    assert caught.value.hint


def test_file_urls_in_arguments_are_local_paths() -> None:
    url, path = "file:///data/a%20b", "/data/a b"
    for kind, text, expected in (
        ("datasets", f"folder(root='{url}')", {"root": path}),
        ("datasets", f"folder('{url}')", {"root": path}),
        ("datasets", "tar(shards='FILE://localhost/data/{0..9}.tar')", {"shards": "/data/{0..9}.tar"}),
        ("backbones", f"timm(name='resnet18', weights='{url}')", {"name": "resnet18", "weights": path}),
    ):
        assert bind_arguments(kind, text) == expected
    with pytest.raises(UnimetricError, match=r"an absolute path of this machine, got `file://data`"):
        bind_arguments("datasets", "folder(root='file://data')")
