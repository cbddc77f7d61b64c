"""The docs are true: their code runs, doctests pass, links and numbers are right, the site builds."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import pkgutil
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import unimetric
from unimetric.cli.catalogue import papers
from unimetric.spec import KINDS, names

ROOT = Path(__file__).parents[1]
DOCS = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name != "papers.md"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
MODULES = [module.name for module in pkgutil.walk_packages(unimetric.__path__, "unimetric.")]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CONTRIBUTING.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_python_on_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.S | re.M):
        exec(compile(textwrap.dedent(block), str(page), "exec"), names)


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_page_of_papers_has_every_part() -> None:
    page = papers()
    for kind in KINDS:
        for name in names(kind):
            assert f"### `{name}`\n\n```text\n{name}(" in page


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]*))?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", (page.parent / target).read_text(), re.M)
                assert anchor in [slug(heading) for heading in headings], f"{page.name}: {target}#{anchor}"


def slug(heading: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_the_tree_of_the_architecture_is_the_tree() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for path in sorted((ROOT / "src" / "unimetric").iterdir()):
        if (path / "__init__.py").exists():
            assert f"  {path.name}/ " in text, f"the tree of docs/architecture.md lacks {path.name}/"
        elif path.suffix == ".py" and path.stem != "__init__":
            assert f"  {path.name} " in text, f"the tree of docs/architecture.md lacks {path.name}"


def test_numbers_of_the_readme_are_in_the_results() -> None:
    readme = (ROOT / "README.md").read_text()
    results = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in ("results", "speed"))
    section = readme.split("## Five measured numbers")[1].split("\n## ")[0]
    rows = [line.split("|")[2:4] for line in section.splitlines() if line.startswith("| [")]
    assert len(rows) == 5
    numbers = [number for row in rows for cell in row for number in re.findall(r"(?<![\w.,])[\d,]+\.\d[\d.±\u2013]*|[\d,]+(?= MiB)", cell)]
    assert len(numbers) >= 15
    for number in numbers:
        assert number.rstrip(".") in results, f"{number} is not in docs/results.md or docs/speed.md"


def test_epochs_of_why_short_runs_mislead() -> None:
    """The tables are read from the runs of 200 and of 150 epochs."""
    named = {
        "margin": "split8_200_margin",
        "Uniform Prior": "split8_200_uniform_prior",
        "multi-similarity": "split8_200_multi_similarity",
        "DiVA, heads 0.5, 1.5, 1.5, 1.5": "split8_200_diva",
        "R-margin": "split8_200_r_margin",
        "S2SD": "split8_200_s2sd",
    }
    page, second, third = re.split("## A second dataset|## Several datasets", (ROOT / "docs" / "why-short-runs-mislead.md").read_text())
    check_epochs(page, named, "oodml.json", early=25, late=200)
    losses = ("triplet", "contrastive")
    named = {"margin": "cub150_margin06", "R-margin": "cub150_r_margin"}
    named |= {loss: f"cub150_{loss}" for loss in losses} | {f"R-{loss}": f"cub150_r_{loss}" for loss in losses}
    check_epochs(second, named, "cub200.json", early=15, late=135)
    named = {"linear embedding": "imb_linear", "static adapter": "imb_static", "stochastic adapter": "imb_stochastic"}
    check_epochs(third, named, "universal.json", early=20, late=100, metric="test/harmonic")


def check_epochs(page: str, named: dict[str, str], file: str, *, early: int, late: int, metric: str = "test/recall(k=1)") -> None:
    runs = json.loads((ROOT / "results" / file).read_text())["runs"]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in page.splitlines() if re.search(r"^\| .*\d\.\d", line)]
    assert sorted(label for label, *_ in rows) == sorted(named)
    for label, *cells in rows:
        curves = [run["curve"] for key, run in runs.items() if re.fullmatch(rf"{named[label]}_\d", key)]
        recalls = [dict(zip(curve["epoch"], curve[metric], strict=True)) for curve in curves if {early, late} <= set(curve["epoch"])]
        best = [max(recall, key=recall.__getitem__) for recall in recalls]
        values = [
            [100 * recall[early] for recall in recalls],
            [100 * recall[epoch] for recall, epoch in zip(recalls, best, strict=True)],
            best,
            [100 * recall[late] for recall in recalls],
        ]
        for cell, found in zip(cells, values, strict=True):
            if len(found) > 2 and found is not best:
                assert cell == f"{statistics.mean(found):.1f} ± {statistics.stdev(found):.1f}", label
                continue
            digits = 0 if found is best else 1
            ends = sorted({f"{value:.{digits}f}" for value in (min(found), max(found))}, key=float)
            assert cell == "\u2013".join(ends), label


def test_first_loss_of_contributing(tmp_path: Path) -> None:
    """Follow the page literally in a copy of the repository: two new files, then its commands."""
    page = (ROOT / "CONTRIBUTING.md").read_text().split("## Your first loss")[1].split("\n## ")[0]
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    files = re.findall(r"`([^`\n]+\.py)`:\n\n```python\n(.*?)^```", page, re.S | re.M)
    assert len(files) == 2
    for path, text in files:
        assert not (tmp_path / path).exists()
        (tmp_path / path).write_text(text)

    said = ""
    commands = [line for block in re.findall(r"^```console\n(.*?)^```", page, re.S | re.M) for line in block.splitlines()]
    programs = {"python": [sys.executable], "unimetric": [sys.executable, "-m", "unimetric.cli"]}
    for line in commands:
        program, *arguments = shlex.split(line)
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "src"), "COLUMNS": "200"}
        done = subprocess.run([*programs[program], *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        said += done.stdout
    assert "align_uniform" in said
    assert "Wang and Isola" in said
    assert (tmp_path / "runs" / "align_uniform" / "done").exists()


def test_every_page_is_in_the_navigation(tmp_path: Path) -> None:
    """Zensical does not report a missing entry, nor an entry without a page."""
    collect(tmp_path / "pages")
    pages = {str(path.relative_to(tmp_path / "pages")) for path in (tmp_path / "pages").rglob("*.md")}
    listed = set(re.findall(r'= "([^"]+\.md)"', (ROOT / "zensical.toml").read_text()))
    assert listed == pages - {"results/LOG.md"}


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("zensical")
    collect(tmp_path / "build" / "pages")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "doctests.py", tmp_path / "docs")
    command = [str(Path(sys.executable).parent / "zensical"), "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "AlignUniform" in (tmp_path / "site" / "CONTRIBUTING.html").read_text()
    assert "p_switch" in (tmp_path / "site" / "docs" / "reference" / "miners.html").read_text()


def collect(folder: Path) -> None:
    """Collect the pages of the site."""
    subprocess.run([sys.executable, str(ROOT / "docs" / "site.py"), str(folder)], check=True)


def test_the_project_file_lists_the_tools_of_the_site() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert set(extras["docs"]) <= pinned
