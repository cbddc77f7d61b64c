"""Page of the tables and figures of the papers, and of what reproduces them.

Each item has the study, config or command that makes it. Run it with `python -m unimetric.studies.coverage`
to write `docs/papers-coverage.md`, or with `--check` to compare.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from unimetric.config import CONFIGS
from unimetric.errors import UnimetricError
from unimetric.files import write_text
from unimetric.report.folders import Record
from unimetric.report.published import agrees, measures, parts, read_papers
from unimetric.studies.grid import Run
from unimetric.studies.ranges import read_any

COVERAGE = Path(__file__).with_name("coverage.toml")
PAGE = Path("docs", "papers-coverage.md")


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper.

    Args:
        name: Number, such as `table 2 (a)`.
        shows: Content in a few words.
        studies: Grids with its runs.
        configs: Configs with single runs of it.
        commands: Further commands that make it, in their order.
        impossible: Reason why it cannot be made. Empty if it can.
        note: Remark for the reader.
        sources: Tables of `papers.toml` with its rows.
        only: Settings of the rows that belong to it, if not all rows of the sources do.
        printed: Number of printed rows.
        groups: Number of groups of columns with runs of their own: datasets or splits.
        dashes: Number of cells, one per row and group, without a value.
        excluded: Printed rows that have no run, with `rows` and a `reason`.
    """

    name: str
    shows: str
    studies: list[str] = field(default_factory=list)
    configs: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    impossible: str = ""
    note: str = ""
    sources: list[str] = field(default_factory=list)
    only: list[dict[str, Any]] = field(default_factory=list)
    printed: int = 0
    groups: int = 1
    dashes: int = 0
    excluded: list[dict[str, Any]] = field(default_factory=list)

    @property
    def row_count(self) -> int:
        """Number of rows that `papers.toml` must have for it."""
        return (self.printed - sum(len(each["rows"]) for each in self.excluded)) * self.groups - self.dashes


@dataclass(frozen=True)
class Paper:
    """A paper with its tables and figures.

    Args:
        title: Title, authors, venue and year.
        cited: Beginning of its `source` in `papers.toml`.
        items: Tables and figures.
    """

    title: str
    cited: str
    items: list[Item]


def read_coverage(path: Path = COVERAGE) -> list[Paper]:
    """Read the tables and figures of the papers."""
    papers = []
    for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
        try:
            papers.append(Paper(table["title"], table["cited"], [Item(**row) for row in table["item"]]))
        except (KeyError, TypeError) as error:
            raise UnimetricError(f"{path.name}: {name}: {error}", "write the arguments of `Item`") from None
    return papers


@cache
def read_study(name: str) -> list[Run]:
    """Return the runs of a study of the package, one per seed-independent setting."""
    found: dict[Any, Run] = {}
    for run in read_any(CONFIGS / "studies" / f"{name}.toml"):
        found.setdefault(replace(run.config, seed=0), run)
    return list(found.values())


def record_of(run: Run) -> Record:
    """Return a run as the report reads it, with its settings alone."""
    return Record(Path(), "", asdict(run.config), [], {}, {}, {})


def rows_of(paper: Paper, item: Item) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the settings of each row of an item, and its values by metric.

    Args:
        paper: Paper of the item.
        item: Table.
    """
    wanted = [f"{paper.cited}, {source}" for source in item.sources]
    for table in read_papers()["table"]:
        if table["source"] not in wanted:
            continue
        for row in table["rows"]:
            when = table["when"] | row["when"]
            if not item.only or any(each.items() <= when.items() for each in item.only):
                yield when, dict(zip(table["metrics"], row["values"], strict=True))


def find_missing(paper: Paper, item: Item, studies: Mapping[str, Iterable[Run]]) -> Iterator[str]:
    """Yield a line for each row of an item without a run, and for each missing value.

    A value is missing if the run does not compute it.

    Args:
        paper: Paper of the item.
        item: Table.
        studies: Runs by name of the study.
    """
    by_dataset: dict[tuple[str, ...], list[tuple[Run, Record]]] = {}
    for name in item.studies:
        for run in studies[name]:
            by_dataset.setdefault(tuple(parts(run.config.dataset)), []).append((run, record_of(run)))
    count = 0
    for when, values in rows_of(paper, item):
        count += 1
        found = [run for run, record in by_dataset.get(tuple(parts(when["dataset"])), []) if agrees(record, when)]
        if not found:
            yield f"{paper.cited}, {item.name}: no run in {', '.join(item.studies)} agrees with {when}"
        absent = [metric for metric, value in values.items() if value and not any(measures(run.config, metric) for run in found)]
        if found and absent:
            yield f"{paper.cited}, {item.name}: the run {found[0].labels} does not compute {', '.join(absent)}"
    if count != item.row_count:
        yield f"{paper.cited}, {item.name}: papers.toml must have {item.row_count} rows of it, got {count}"


def check(papers: Iterable[Paper]) -> list[str]:
    """Return one line per row without a run, and per study or config that does not exist."""
    lines = []
    for paper in papers:
        for item in paper.items:
            files = [*(f"studies/{name}.toml" for name in item.studies), *(f"{name}.toml" for name in item.configs)]
            absent = [name for name in files if not (CONFIGS / name).is_file()]
            lines += [f"{paper.cited}, {item.name}: {name} does not exist" for name in absent]
            if not (item.studies or item.configs or item.commands or item.impossible):
                lines.append(f"{paper.cited}, {item.name}: nothing makes it; name a study, a command, or why it is not possible")
            if not absent:
                lines += find_missing(paper, item, {name: read_study(name) for name in item.studies})
    return lines


def commands_of(item: Item) -> list[str]:
    """Return all commands that make an item."""
    runs = [f"unimetric bench {name}" for name in item.studies] + [f"unimetric train {name} --out runs/{name}" for name in item.configs]
    reports = [f"unimetric report {' '.join(f'runs/{name}' for name in item.studies)}"] if item.studies else []
    return runs + (item.commands or reports)


def write_page(papers: Iterable[Paper]) -> str:
    """Return the page, in Markdown."""
    lines = [
        "# Tables and figures of the papers",
        "",
        "Every table and figure of the four papers and their supplements, with the commands that make it. `unimetric bench` runs a study",
        "of the package; its header has the number of runs and the time. The report has the values of the papers next to the results of",
        "the same settings. `python -m unimetric.studies.coverage` writes this page, if every printed row has a run with its settings.",
    ]
    for paper in papers:
        lines += ["", f"## {paper.title}", "", "| | shows | made by | rows without a run, remarks |", "|---|---|---|---|"]
        lines += [_line(item) for item in paper.items]
    return "\n".join(lines) + "\n"


def _line(item: Item) -> str:
    """Return the row of an item in the page."""
    made = "<br>".join(f"`{command}`" for command in commands_of(item))
    if item.impossible:
        made = "<br>".join(each for each in (made, f"not possible: {item.impossible}") if each)
    remarks = [f"{', '.join(each['rows'])}: {each['reason']}" for each in item.excluded]
    if item.note:
        remarks.append(item.note)
    cells = [item.name.capitalize(), item.shows, made, "<br>".join(remarks)]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def main(arguments: list[str]) -> int:
    """Write the page, or compare it with the file if `--check` is given."""
    papers = read_coverage()
    lines = check(papers)
    page = write_page(papers)
    if "--check" in arguments:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page:
            lines.append(f"{PAGE} is not up to date: run `python -m unimetric.studies.coverage`")
    elif not lines:
        write_text(PAGE, page)
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    if not lines:
        count = sum(item.row_count for paper in papers for item in paper.items)
        print(f"{sum(len(paper.items) for paper in papers)} tables and figures; {count} rows have a run")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
