"""The docs are true: their code runs, doctests pass, generated pages are fresh."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import unimetric
from unimetric.cli.catalogue import papers
from unimetric.spec import kinds, names

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [module.name for module in pkgutil.walk_packages(unimetric.__path__, "unimetric.")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_on_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_page_of_papers_has_every_part() -> None:
    page = papers()
    for kind in kinds():
        for name in names(kind):
            assert f"### `{name}`\n\n```text\n{name}(" in page


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_tree_of_the_readme_is_the_tree() -> None:
    text = (ROOT / "README.md").read_text()
    for folder in sorted(path.name for path in (ROOT / "src" / "unimetric").iterdir() if (path / "__init__.py").exists()):
        assert f"  {folder}/" in text, f"README's tree lacks {folder}/"
