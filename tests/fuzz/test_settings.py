"""Damaged configs, overrides and spec strings get a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fuzz.conftest import Change, answer, cases, damage, text_changes, within_limit

from unimetric.config import CONFIGS, RunConfig
from unimetric.errors import UnimetricError
from unimetric.spec import bind, names

CONFIGURATIONS = sorted(CONFIGS.rglob("*.toml"))
KINDS = ["losses", "miners", "samplers", "metrics", "heads", "transforms", "optimizers", "schedules", "splits"]


@cases(100)
@given(path=st.sampled_from(CONFIGURATIONS), changes=text_changes)
def test_damaged_config(path: Path, changes: list[Change], tmp_path: Path) -> None:
    file = tmp_path / "damaged.toml"
    file.write_text(damage(path.read_text(), changes), encoding="utf-8")
    answer("check", file)


@cases(80)
@given(setting=st.sampled_from([f"{key}={value}" for key, value in vars(RunConfig()).items()]), changes=text_changes)
@example(setting="loss=b", changes=[("insert", 0.9, 0, "a." * 5000)])
def test_damaged_override(setting: str, changes: list[Change]) -> None:
    answer("check", damage(setting, changes))


@cases(120)
@given(kind=st.sampled_from(KINDS), name=st.integers(0, 99), changes=text_changes)
def test_damaged_spec(kind: str, name: int, changes: list[Change]) -> None:
    known = names(kind)
    with within_limit():
        try:
            bind(kind, damage(f"{known[name % len(known)]}(k=1, beta=0.5, name='x', weights=(1, 2.5))", changes))
        except UnimetricError as error:
            assert 0 < len(str(error)) < 12000, "a sentence"


@pytest.mark.parametrize(
    "words", [["check", "train"], ["train", "--out"], ["evaluate"], ["list", "loss"], ["report", "nowhere"], ["bench", "x.toml"]]
)
def test_wrong_words(words: list[str]) -> None:
    assert answer(*words)[0] == 2
