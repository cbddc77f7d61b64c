"""`list`, `configs` and the help: components, settings and configurations of the package."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from tests.conftest import run_command

from unimetric.cli.catalogue import arguments, papers, settings_page
from unimetric.config import RunConfig, load, shipped_configs
from unimetric.spec import KINDS, declaration, names


@pytest.fixture
def typed(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run a command in an empty folder; returns its exit code, and its output on one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> tuple[int, str]:
        code, out, errors = run_command(capsys, monkeypatch, *words)
        return code, " ".join((out + errors).split())

    return run


def test_list_describes_one_component(typed) -> None:
    code, out = typed("list", "losses", "margin")
    assert code == 0
    assert "margin(margin=0.2, beta=1.2, nu=0.0" in out
    assert "[d(a, p) - beta_y + margin]_+" in out  # the equation
    assert "Sampling matters in deep embedding learning (Wu et al., ICCV 2017)" in out
    assert "nu: number, at least 0; default 0.0 Weight of the penalty" in out
    assert "Args:" not in out


def test_list_names_allowed_values_and_required_arguments(typed) -> None:
    assert "reduction: `mean`, `row` or `sum`; default 'mean'" in typed("list", "objectives", "crt")[1]
    assert "num_classes: integer, at least 1; from the run" in typed("list", "losses", "arcface")[1]
    assert "root: string; required" in typed("list", "datasets", "folder")[1]


@pytest.mark.parametrize("kind", KINDS)
def test_list_explains_every_argument(kind: str) -> None:
    for name in names(kind):
        for argument, allowed, default, meaning in arguments(declaration(kind, name)):
            assert allowed and default and meaning, (kind, name, argument)


def test_list_rejects_unknown_names(typed) -> None:
    assert typed("list", "margin") == (2, "error: unknown component type `margin` hint: write `unimetric list losses margin`")
    assert typed("list", "losses", "margn") == (2, "error: no `margn` in losses hint: did you mean `margin`?")
    assert typed("list", "settings", "sed") == (2, "error: unknown setting `sed` hint: did you mean `seed`?")


def test_list_settings_has_every_setting(typed) -> None:
    code, out = typed("list", "settings")
    assert code == 0
    for field in fields(RunConfig):
        assert f"{field.name}: " in out
    assert "batch_size: integer, from 2 to 1048576; default 112 Images per step" in out
    assert "loss: see `unimetric list losses`; default margin Loss spec string." in out
    assert typed("list", "settings", "seed")[1].startswith("seed: integer, from 0 to 4294967295; default 0")


def test_pages_have_every_setting_and_component() -> None:
    page = settings_page()
    assert [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")] == [field.name for field in fields(RunConfig)]
    assert all(line.count("|") == 5 for line in page.splitlines() if line.startswith("|"))
    assert "margin(margin=0.2, beta=1.2" in papers()


@pytest.mark.parametrize("command", ["train", "bench", "evaluate", "tune"])
def test_help_names_every_setting(typed, command: str) -> None:
    code, out = typed(command, "--help")
    assert code == 0 and "unimetric list settings" in out
    assert all(re.search(rf"\b{field.name}\b", out) for field in fields(RunConfig))


def test_configs_lists_every_file_with_its_headline(typed) -> None:
    code, out = typed("configs")
    assert code == 0
    for name, file in shipped_configs().items():
        headline = file.read_text(encoding="utf-8").splitlines()[0]
        assert headline.startswith("# "), f"{name}: begin the file with a comment"
        assert f"{name} {headline[2:20]}" in out


def test_configs_copies_a_file_that_runs(typed, tmp_path: Path) -> None:
    assert typed("configs", "copy", "glyphs_margin") == (0, "glyphs_margin.toml; run it with: unimetric train glyphs_margin.toml")
    assert load("glyphs_margin.toml") == load(shipped_configs()["glyphs_margin"])
    assert typed("configs", "copy", "glyphs_losses", "my.toml") == (0, "my.toml; run it with: unimetric bench my.toml")
    (tmp_path / "folder").mkdir()
    assert typed("configs", "copy", "glyphs_margin", "folder")[0] == 0 and (tmp_path / "folder" / "glyphs_margin.toml").is_file()
    code, out = typed("configs", "copy", "glyphs_margin", "my.toml")
    assert code == 2 and "my.toml: exists already" in out
    assert (tmp_path / "my.toml").read_text() == shipped_configs()["glyphs_losses"].read_text()


def test_configs_shows_a_file(typed) -> None:
    assert typed("configs", "show", "glyphs_margin")[1] == " ".join(shipped_configs()["glyphs_margin"].read_text().split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("configs glyphs_margin", "hint: write `unimetric configs show glyphs_margin`"),
        ("configs cop", "did you mean `copy`?"),
        ("configs copy glyph_margin", "no configuration `glyph_margin` hint: did you mean `glyphs_margin`?"),
        ("check absent.toml", "`unimetric configs` lists configurations to start from"),
        ("train src/glyphs_margin.toml", "write `glyphs_margin`: configurations of the package are found by name"),
    ],
)
def test_configs_rejects_unknown_words(typed, words: str, says: str) -> None:
    code, out = typed(*words.split())
    assert code == 2 and says in out
