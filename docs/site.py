"""Collect the pages of the documentation site in build/pages, with the generated ones: `python docs/site.py`.

The folder mirrors the repository, so that a relative link works on GitHub and on the site. `make docs` then runs
`zensical build --strict`, which fails on a link without a target and on a name without a docstring page.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from unimetric.cli.catalogue import papers, settings_page
from unimetric.spec import KINDS, names

ROOT = Path(__file__).parents[1]
COPIED = ("CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "docs", "examples", "results/LOG.md", "results/runs.csv")
PUBLIC = {
    "create": "unimetric.spec.create",
    "load": "unimetric.config.load",
    "train": "unimetric.training.loop.train",
    "evaluate": "unimetric.analysis.evaluate.evaluate",
    "compiled": "unimetric.training.capture.compiled",
    "Space": "unimetric.geometry.space.Space",
    "UnimetricError": "unimetric.errors.UnimetricError",
}
MODULES = {
    "config": ("config",),
    "geometry": ("geometry.pairs", "geometry.nearest", "geometry.kmeans", "geometry.rerank", "geometry.frechet"),
    "images": ("images.table", "images.recipe", "images.pack", "images.packing"),
    "runs": ("runs.folder", "runs.rows", "runs.model", "runs.embed", "runs.device", "runs.weights"),
    "analysis": ("analysis.evaluate", "analysis.adapt", "analysis.curves", "analysis.shift", "analysis.split", "analysis.transfer"),
    "studies": ("studies.grid", "studies.ranges", "studies.local"),
}


def reference() -> dict[str, str]:
    """Write the pages of the API reference: one per component type, one per group of modules."""
    pages = {"index": "# Python API\n\nThe names that `import unimetric` offers.\n\n" + _entries(PUBLIC.values())}
    for kind in KINDS:
        pages[kind] = f"# unimetric.{kind}\n\n" + _entries(f"unimetric.{kind}.{name}" for name in names(kind))
    for name, modules in MODULES.items():
        pages[name] = f"# unimetric.{name}\n\n" + _entries(f"unimetric.{module}" for module in modules)
    return pages


def collect(folder: Path) -> None:
    """Copy the written pages and write the generated ones."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "README.md", folder / "index.md")
    for name in COPIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "papers.md", "settings.md"))
        else:
            shutil.copy(ROOT / name, folder / name)
    (folder / "docs" / "papers.md").write_text(papers())
    (folder / "docs" / "settings.md").write_text(settings_page())
    (folder / "docs" / "reference").mkdir()
    for name, text in reference().items():
        (folder / "docs" / "reference" / f"{name}.md").write_text(text)


def _entries(targets: Iterable[str]) -> str:
    return "".join(f"::: {target}\n\n" for target in targets)


if __name__ == "__main__":
    collect(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "pages")
