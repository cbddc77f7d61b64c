"""Writes `docs/results.md` and its figures: prose from `results/page.md`, numbers from `results/*.json` as `results/tables.toml` says.

    python results/page.py              # the page and its figures; `make results` does the same
    python results/page.py --text       # the page alone

In the prose, a line `{{ table: NAME }}` becomes a table, `{{ time: NAME }}` what its runs cost, `{{ cell: NAME > row > column }}` one of
its numbers, `{{ correlation: NAME > column > column }}` Pearson's of two columns over its rows, and `{{ runs }}` a list of every run. Over
several runs a number is their mean +- their standard deviation.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from unimetric.errors import UnimetricError, closest
from unimetric.files import write_text
from unimetric.shift.ags import ags

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "results.md"
#: What a run has once, whatever the epoch.
_WHOLE = ("epochs", "seconds", "pictures_per_second")


class Results:
    """The numbers of a folder of results, and how they are put together.

    Args:
        folder: with `tables.toml` and the JSON files that it names.
    """

    def __init__(self, folder: Path = HERE) -> None:
        self.folder, self.place = folder, folder / "tables.toml"
        declared = tomllib.loads(self.place.read_text(encoding="utf-8"))
        self.tables: dict[str, dict[str, Any]] = declared.get("table", {})
        self.figures: dict[str, dict[str, Any]] = declared.get("figure", {})
        self.files: dict[str, dict[str, Any]] = {}

    def read(self, file: str) -> dict[str, Any]:
        """A JSON file, read once."""
        if file not in self.files:
            if not (self.folder / file).is_file():
                raise UnimetricError(f"{self.place}: {file}: no such file", "make it with `python results/collect.py RUN... --out FILE`")
            self.files[file] = json.loads((self.folder / file).read_text(encoding="utf-8"))
        return self.files[file]

    def table(self, name: str) -> dict[str, Any]:
        """A declared table."""
        if name not in self.tables:
            raise UnimetricError(f"{self.place}: no table `{name}`", closest(name, self.tables))
        return self.tables[name]

    def run(self, table: str, name: str) -> dict[str, Any]:
        """A run of a table's files."""
        runs: dict[str, Any] = {}
        for file in self.table(table)["files"]:
            runs |= self.read(file)["runs"]
        if name not in runs:
            raise UnimetricError(
                f"{self._files(table)}: no run `{name}`, which table `{table}` of {self.place.name} names", closest(name, runs)
            )
        return runs[name]

    def _files(self, table: str) -> str:
        return ", ".join(self.table(table)["files"])

    # --- one number -------------------------------------------------------------------------------------------------

    def number(self, table: str, name: str, column: dict[str, Any]) -> tuple[float, float | None]:
        """A metric of one run, and half of its interval where the run itself has one (over episodes)."""
        run, metric = self.run(table, name), column["metric"]
        if metric in _WHOLE:
            return float(self._get(run, metric, table, name)), None
        if metric.startswith("train/"):
            return float(self._get(run.get("train", {}), metric, table, name)), None
        if metric.startswith("few_shot/"):
            found = self._get(run.get("few_shot", {}), metric, table, name)
            return (found[0], found[1]) if isinstance(found, list) else (found, None)
        line = self._line(run, column, table, name)
        return float(self._get(line, metric, table, name)), None

    def _line(self, run: dict[str, Any], column: dict[str, Any], table: str, name: str) -> dict[str, Any]:
        lines, epoch = run["lines"], column.get("epoch", "best")
        if epoch in ("first", "last"):
            return lines[0 if epoch == "first" else -1]
        key = column.get("best", self.table(table)["best"])
        for line in lines:
            self._get(line, key, table, name)
        trained = [line for line in lines if line["epoch"]]  # a run that never gets above where it started has a best epoch all the same
        return max(trained or lines, key=lambda line: line[key])  # the first of equals

    def _get(self, found: dict[str, Any], key: str, table: str, name: str) -> Any:
        if key not in found:
            raise UnimetricError(f"{self._files(table)}: run `{name}` has no `{key}`", closest(key, found))
        return found[key]

    def cell(self, table: str, row: dict[str, Any], column: dict[str, Any]) -> str:
        """A number of a table, or the text that its row has in its place."""
        if "text" in column:
            return str(row.get(column["text"], ""))
        if "ags" in column:
            if any(key not in row for key in column["ags"]):
                return ""
            by_split = [[self.number(table, name, column)[0] for name in row[key]] for key in column["ags"]]
            if len({len(seeds) for seeds in by_split}) > 1:
                raise UnimetricError(f"{self.place}: table `{table}`, row `{row['label']}`: not as many runs of every split", "level them")
            return shown([ags(list(column["ags"].values()), list(scores)) for scores in zip(*by_split, strict=True)], None, column)
        of = column.get("of", "runs")
        if of not in row:
            return ""
        found = [self.number(table, name, column) for name in row[of]]
        return shown([value for value, _ in found], found[0][1] if len(found) == 1 else None, column)

    def mean(self, table: str, names: list[str], column: dict[str, Any]) -> float:
        """Over the runs."""
        return statistics.fmean(self.number(table, name, column)[0] for name in names)

    # --- what stands on the page ------------------------------------------------------------------------------------

    def as_markdown(self, name: str) -> str:
        """A declared table."""
        table = self.table(name)
        columns = table["columns"]
        rows = [row["cells"] if "cells" in row else [self.cell(name, row, column) for column in columns] for row in table["rows"]]
        for row, texts in zip(table["rows"], rows, strict=True):
            if len(texts) != len(columns):
                raise UnimetricError(f"{self.place}: table `{name}`, row `{row['label']}`: {len(texts)} cells", f"write {len(columns)}")
        for place, column in enumerate(columns):
            if column.get("bold"):
                values = [_leading(texts[place]) for texts in rows]
                for texts, value in zip(rows, values, strict=True):
                    texts[place] = f"**{texts[place]}**" if value == max(values) else texts[place]
        head = [table.get("label", ""), *(column["head"] for column in columns)]
        lines = [_joined(head), "|---" * len(head) + "|"]
        lines += [_joined([row["label"], *texts]) for row, texts in zip(table["rows"], rows, strict=True)]
        return "\n".join(lines)

    def names(self, name: str) -> list[str]:
        """The runs of a table, in its order."""
        found: dict[str, None] = {}
        for row in self.table(name)["rows"]:
            for value in row.values():
                if isinstance(value, list) and value is not row.get("cells"):
                    found |= dict.fromkeys(value)
        return list(found)

    def as_time(self, name: str) -> str:
        """What a table's runs cost."""
        runs = [self.run(name, each) for each in self.names(name)]
        runs = [run for run in runs if "seconds" in run]
        if not runs:
            raise UnimetricError(f"{self.place}: table `{name}` has no run that says how long it took", "take `{{ time: ... }}` out")
        spent, speed = sum(run["seconds"] for run in runs), statistics.median(run["pictures_per_second"] for run in runs)
        return f"{len(runs)} run{'s' if len(runs) > 1 else ''}, {spent:,.0f} s of training in all, median {speed:,.0f} pictures/s"

    def as_cell(self, words: str) -> str:
        """One number of a table: `table > row > column`."""
        name, row, column = self._three("cell", words, "table > row > column")
        found, shape = self._named(name, "rows", row), self._named(name, "columns", column)
        return found["cells"][self.table(name)["columns"].index(shape)] if "cells" in found else self.cell(name, found, shape)

    def as_correlation(self, words: str) -> str:
        """Pearson's correlation of two columns over the rows of a table: `table > column > column`."""
        name, first, second = self._three("correlation", words, "table > column > column")
        points = self.points(name, first, second)
        return f"{statistics.correlation([x for x, _, _ in points], [y for _, y, _ in points]):.2f} over {len(points)}"

    def points(self, table: str, first: str, second: str) -> list[tuple[float, float, str]]:
        """Two columns of each row that has runs, as they are shown, and its label."""
        columns = [self._named(table, "columns", head) for head in (first, second)]
        found = []
        for row in (row for row in self.table(table)["rows"] if "cells" not in row):
            x, y = (column.get("scale", 100) * self.mean(table, row[column.get("of", "runs")], column) for column in columns)
            found.append((x, y, row["label"]))
        return found

    def _three(self, kind: str, words: str, form: str) -> list[str]:
        parts = [word.strip() for word in words.split(">")]
        if len(parts) != 3:
            raise UnimetricError(f"{self.folder / 'page.md'}: cannot read `{kind}: {words}`", f"write `{{{{ {kind}: {form} }}}}`")
        return parts

    def _named(self, table: str, kind: str, word: str) -> dict[str, Any]:
        known = {each["head" if kind == "columns" else "label"]: each for each in self.table(table)[kind]}
        if word not in known:
            raise UnimetricError(f"{self.place}: table `{table}` has no `{word}`", closest(word, known))
        return known[word]

    def as_runs(self) -> str:
        """Every run that is kept: how long it trained, and how fast."""
        lines = [_joined(["run", "file", "session", "epochs", "training, s", "pictures/s (median)"]), "|---" * 6 + "|"]
        for file in sorted(path.name for path in self.folder.glob("*.json")):
            for name, run in self.read(file).get("runs", {}).items():
                numbers = [f"{run[key]:,.0f}" if key in run else "" for key in _WHOLE]
                lines.append(_joined([name, file, run["session"], *numbers]))
        return "\n".join(lines)

    def fill(self, text: str) -> str:
        """The prose with its numbers."""
        parts = {"table": self.as_markdown, "time": self.as_time, "cell": self.as_cell, "correlation": self.as_correlation}

        def put(found: re.Match[str]) -> str:
            kind, _, words = found[1].partition(":")
            if kind == "runs":
                return self.as_runs()
            if kind not in parts:
                raise UnimetricError(f"{self.folder / 'page.md'}: cannot read `{found[0]}`", closest(kind, [*parts, "runs"]))
            return parts[kind](words.strip())

        return re.sub(r"\{\{ (.+?) \}\}", put, text)

    # --- figures ----------------------------------------------------------------------------------------------------

    def draw(self, folder: Path) -> None:
        """Every declared figure.

        Args:
            folder: where the PNG files go.
        """
        from unimetric.engine.shift import draw_report
        from unimetric.engine.split import write_splits

        for name, figure in self.figures.items():
            if "splits" in figure:
                with tempfile.TemporaryDirectory() as place:  # the picture is a by-product of the file of splits
                    write_splits(Path(place) / "splits.json", self.read(figure["splits"]), {})
                    (folder / f"{name}.png").write_bytes((Path(place) / "splits.png").read_bytes())
                continue
            if "x" in figure:
                self._scatter(folder / f"{name}.png", figure)
                continue
            table = self.table(figure["table"])
            column = next(column for column in table["columns"] if "ags" in column)
            where, methods = list(column["ags"].values()), {}
            for row in (row for row in table["rows"] if "cells" not in row):
                scores = [self.mean(figure["table"], row[key], column) for key in column["ags"]]
                methods[row["label"]] = {
                    "distances": where,
                    "scores": {figure["metric"]: scores},
                    "ags": {figure["metric"]: ags(where, scores)},
                }
            draw_report(folder / f"{name}.png", {"methods": methods}, figure["metric"])

    def _scatter(self, path: Path, figure: dict[str, Any]) -> None:
        from unimetric.engine.canvas import Canvas

        points = self.points(figure["table"], figure["x"], figure["y"])
        with Canvas(path, width=8, height=5) as axes:
            axes.margins(x=0.15)
            axes.plot([x for x, _, _ in points], [y for _, y, _ in points], "o", markersize=4, color="tab:blue")
            axes.set(xlabel=figure["x"], ylabel=figure["y"])
            axes.autoscale_view()  # else the limits are set when it is drawn
            places = axes.transData.transform([(x, y) for x, y, _ in points]) * 72 / axes.figure.dpi  # in points, as letters are measured
            taken: list[tuple[float, ...]] = [(x - 2, y - 2, x + 2, y + 2) for x, y in places]
            for (x, y, label), (left, low) in zip(points, places, strict=True):
                shift, box = _free(left, low, 3.4 * len(label), taken)
                taken.append(box)
                axes.annotate(label, (x, y), xytext=shift, textcoords="offset points", fontsize=6)


def _free(x: float, y: float, width: float, taken: list[tuple[float, ...]]) -> tuple[tuple[float, float], tuple[float, ...]]:
    """Where a label of six points beside a dot hides least of what is there: its shift from the dot, and its box."""
    shifts = [(side, high) for near in ((2.0, -7.0), (8.0, -13.0)) for side in (4.0, -4.0 - width) for high in near]
    boxes = [(x + side, y + high, x + side + width, y + high + 5) for side, high in shifts]

    def hidden(box: tuple[float, ...]) -> float:
        overlaps = ((min(box[2], other[2]) - max(box[0], other[0]), min(box[3], other[3]) - max(box[1], other[1])) for other in taken)
        return sum(wide * high for wide, high in overlaps if wide > 0 and high > 0)

    best = min(range(len(boxes)), key=lambda place: hidden(boxes[place]))  # the first of equals
    return shifts[best], boxes[best]


def shown(values: list[float], spread: float | None, column: dict[str, Any]) -> str:
    """A mean as the column wants it, with the standard deviation over several values.

    >>> shown([0.60, 0.62], None, {}), shown([0.1234], None, {"scale": 1, "digits": 3})
    ('61.0 +- 1.4', '0.123')
    """
    scale, digits = column.get("scale", 100), column.get("digits", 1)
    if len(values) > 1:
        spread = statistics.stdev(values)
    text = f"{scale * statistics.fmean(values):,.{digits}f}"
    return text if spread is None else f"{text} +- {scale * spread:,.{digits}f}"


def _leading(text: str) -> float:
    found = re.match(r"-?[\d.,]+", text)
    return float(found[0].replace(",", "")) if found else float("-inf")


def _joined(texts: list[str]) -> str:
    return "|" + "".join(f" {text} |" if text else " |" for text in texts)


def page(folder: Path = HERE) -> str:
    """The text of `docs/results.md`."""
    return Results(folder).fill((folder / "page.md").read_text(encoding="utf-8"))


def main() -> None:
    """Write the page, and draw its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", action="store_true", help="draw no figures")
    given = parser.parse_args()
    try:
        write_text(PAGE, page())
        if not given.text:
            Results().draw(PAGE.parent)
    except UnimetricError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
