"""Write `docs/results.md`, `docs/speed.md`, figures and `results/runs.csv` from `results/*.json`: `make results`.

`results/page.md` and `results/speed.md` are the texts of the pages, `results/tables.toml` defines their tables. Placeholders of a text:

    {{ table: NAME }}                                a table with its caption
    {{ cell: TABLE > ROW > COLUMN }}                 one value of a table
    {{ correlation: TABLE > COLUMN > COLUMN }}       Pearson's correlation over the rows with both values, and its interval
    {{ difference: TABLE > COLUMN > COLUMN }}        mean of the second column minus the first, its standard error, and the number of rows
    {{ verdict: TABLE > COLUMN > A over B, C ; G }}  verdict and evidence: whether row A exceeds rows B and C; A - B is G in the paper
    {{ rarer: TABLE > COLUMN }}                      by how much half as many evaluations lower the best value, and the number of runs
    {{ figure: NAME ; T }}                           a figure with the caption T, if its runs are stored
"""

from __future__ import annotations

import csv
import inspect
import io
import json
import math
import re
import statistics
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scipy.special import stdtrit

from unimetric.analysis.curves import ags
from unimetric.config import RunConfig
from unimetric.errors import UnimetricError, closest
from unimetric.files import write_text

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PAGES = {"page.md": "results.md", "speed.md": "speed.md"}
Table = dict[str, Any]


class Results:
    """Stored runs and benchmarks, and the tables made of them.

    Args:
        folder: Folder with `tables.toml` and the JSON files.
    """

    def __init__(self, folder: Path = HERE) -> None:
        self.runs: dict[str, Table] = {}
        self.records: dict[str, Table] = {}
        for path in sorted(folder.glob("*.json")):
            stored = json.loads(path.read_text(encoding="utf-8"))
            self.runs |= {name: run | {"file": path.name} for name, run in stored.get("runs", {}).items()}
            self.records |= stored.get("benchmarks", {})
        declared = tomllib.loads((folder / "tables.toml").read_text(encoding="utf-8"))
        self.tables = {name: self.resolve(table) for name, table in declared.get("table", {}).items()}
        self.figures = {name: figure for name, figure in declared.get("figure", {}).items() if self.find("table", figure["table"])["rows"]}

    def resolve(self, table: Table) -> Table:
        """Replace the groups of runs in a table's rows by lists of run names; drop rows without runs if it is `optional`."""
        keys = {key for column in table["columns"] if "metric" in column for key in column.get("ags", [column.get("of", "runs")])}
        rows = [self.records[name] for name in table.get("records", [])]
        for row in table.get("rows", []):
            groups = {key: self.select(row[key], row.get("variant", "")) for key in keys & row.keys()}
            if all(groups.values()):
                rows.append(row | groups)
            elif not table.get("optional"):
                raise UnimetricError(f"tables.toml: no runs for row `{row['label']}`", "collect them, or set `optional = true`")
        return table | {"rows": rows, "keys": keys, "labels": [row["label"] for row in table.get("rows", [])]}

    def select(self, wanted: str | Table, variant: str) -> list[str]:
        """Return the names of runs.

        Args:
            wanted: Name with or without the seed, or settings such as `{ miner = "rho", split = "split=8", epochs = 200 }`. A
                component is given by its spec string, its name or one of its arguments.
            variant: Variant of the head that the runs must have, such as `weights=1,1,1,1`; empty for any.
        """
        chosen = []
        for name, run in sorted(self.runs.items()):
            settings = asdict(RunConfig()) | run["settings"] | {"epochs": run["epochs"]}
            if isinstance(wanted, str):
                fits = bool(re.fullmatch(rf"{re.escape(wanted)}(_\d+)?", name))
            else:
                fits = all(value in (settings[key], *re.split(r"[(),] *", str(settings[key]))) for key, value in wanted.items())
            if variant:
                fits = fits and any(key.startswith(f"test {variant}/") for key in run["curve"])
            if fits:
                chosen.append(name)
        return chosen

    def values(self, table: Table, row: Table, column: Table) -> list[Any]:
        """Return the values of a cell, one per run; of a text, the number that it begins with."""
        if "ags" in column:
            scores = [self.values(table, row, {"metric": column["metric"], "of": key}) for key in column["ags"]]
            return [ags(list(column["ags"].values()), list(seed)) for seed in zip(*scores, strict=True)]
        if "text" in column:
            return [float(number) / column.get("scale", 100) for number in re.findall(r"^[\d.]+", str(row.get(column["text"], "")))]
        names = row.get(column.get("of", "runs"), [])
        if column.get("optional"):  # a metric of the training images, which some runs lack, and every variant of a head
            names = [name for name in names if column["metric"] in self.runs[name].get("train", {}) and "variant" not in row]
        return [self.value(table, row, column, name) for name in names]

    def value(self, table: Table, row: Table, column: Table, name: str) -> Any:
        """Return a metric of one run, at the best epoch unless the column has another `epoch`."""
        run, metric = self.runs[name], column["metric"]
        for stored in (run, run.get("train", {}), run.get("few_shot", {})):
            if metric in stored:
                return stored[metric]
        metric, best = (in_variant(key, row) for key in (metric, str(column.get("best", table["best"]))))
        for key in (metric, best):
            if key not in run["curve"]:
                raise UnimetricError(f"{run['file']}: run `{name}` has no `{key}`", closest(key, run["curve"]))
        return run["curve"][metric][find_epoch(run["curve"], best, column.get("epoch", "best"))]

    def cell(self, table: Table, row: Table, column: Table) -> str:
        """Return the text of a cell."""
        if "text" in column:
            return str(row.get(column["text"], ""))
        values = self.values(table, row, column)
        return show(values, column) if values else ""

    def means(self, table: Table, head: str) -> dict[str, float]:
        """Return the mean of a column in each row that has values, in the unit of the table."""
        column = self.find("column", head, table)
        cells = {row["label"]: self.values(table, row, column) for row in table["rows"]}
        return {label: column.get("scale", 100) * statistics.fmean(values) for label, values in cells.items() if values}

    def points(self, table: Table, first: str, second: str) -> dict[str, tuple[float, float]]:
        """Return the means of two columns in each row that has both."""
        x, y = self.means(table, first), self.means(table, second)
        return {label: (x[label], y[label]) for label in x if label in y}

    def find(self, kind: str, name: str, table: Table | None = None) -> Any:
        """Return a table, or a column of a table, by its name."""
        known = self.tables if table is None else {column["head"]: column for column in table["columns"]}
        if name not in known:
            raise UnimetricError(f"page.md: unknown {kind} `{name}`", closest(name, known))
        return known[name]

    # --- placeholders -----------------------------------------------------------------------------------------------

    def as_table(self, name: str) -> str:
        """Format a table with its caption, which names device, commits, dates and seeds of its runs."""
        table = self.find("table", name)
        rows, columns = table["rows"], [column for column in table["columns"] if not column.get("hidden")]
        if not rows:
            return f"**{table['title']}.** {table['caption']} No such runs are stored yet. Command: `{table['command']}`."
        runs = [self.runs[name] for row in rows for key in table["keys"] & row.keys() for name in row[key]]
        source = ""
        if runs:
            found = {key: sorted({run[key] for run in runs}) for key in ("device", "commit", "date")}
            seeds = sorted({run["settings"].get("seed", 0) for run in runs})
            dates = " to ".join(dict.fromkeys((found["date"][0], found["date"][-1])))
            source = f"{', '.join(found['device'])}; commits {', '.join(found['commit'])} ({dates}); "
            source += f"seeds {', '.join(map(str, seeds))}. "
        lines = [["", *(column["head"] for column in columns)], ["---"] * (len(columns) + 1)]
        lines += [[row["label"], *(self.cell(table, row, column) for column in columns)] for row in rows]
        text = "\n".join("|" + " |".join(line) + "|" for line in lines)
        command = f"Command: `{table['command']}`." if "command" in table else "The last column is the command."
        return f"**{table['title']}.** {table['caption']} {source}{command}\n\n{text}"

    def as_cell(self, name: str, label: str, head: str) -> str:
        """Format one value."""
        table = self.find("table", name)
        rows = {row["label"]: row for row in table["rows"]}
        if label not in rows:
            raise UnimetricError(f"page.md: unknown row `{label}`", closest(label, rows))
        return self.cell(table, rows[label], self.find("column", head, table))

    def as_correlation(self, name: str, first: str, second: str) -> str:
        """Format Pearson's correlation of two columns, the number of rows that have both, and Fisher's interval for more than three."""
        points = self.points(self.find("table", name), first, second)
        found = statistics.correlation(*zip(*points.values(), strict=True))
        interval = ""
        if len(points) > 3:
            half = 1.96 / math.sqrt(len(points) - 3)
            interval = ", 95 % interval {:.2f} to {:.2f}".format(*(math.tanh(math.atanh(found) + end) for end in (-half, half)))
        return f"{found:.2f} ({len(points)} rows{interval})"

    def as_difference(self, name: str, first: str, second: str) -> str:
        """Format the mean difference of two columns, its standard error over the rows with both, and the number of these rows."""
        gaps = [after - before for before, after in self.points(self.find("table", name), first, second).values()]
        return f"{statistics.mean(gaps):.1f}±{statistics.stdev(gaps) / len(gaps) ** 0.5:.1f} ({len(gaps)} rows)"

    def as_rarer(self, name: str, head: str) -> str:
        """Format by how much the best value is lower without every second evaluation, on average, and the number of runs."""
        table = self.find("table", name)
        column = self.find("column", head, table)
        names = [name for row in table["rows"] for name in row.get(column.get("of", "runs"), [])]
        curves = [self.runs[name]["curve"][column["metric"]][1:] for name in names]  # without the untrained network
        gaps = [max(curve) - (max(curve[::2]) + max(curve[1::2])) / 2 for curve in curves if len(curve) > 1]
        return f"{column.get('scale', 100) * statistics.fmean(gaps):.1f} points ({len(gaps)} runs)"

    def as_verdict(self, name: str, head: str, claim: str, paper: str) -> str:
        """Format the verdict on `A over B, C` and its evidence, as two cells.

        A claim that does not hold is refuted if three seeds exclude that A exceeds B by as much as in the paper (95 % interval of Welch).
        """
        table = self.find("table", name)
        labels = re.split(" over |, ", claim)
        if unknown := [label for label in labels if label not in table["labels"]]:
            raise UnimetricError(f"page.md: unknown row `{unknown[0]}`", closest(unknown[0], table["labels"]))
        means = self.means(table, head)
        if not means.keys() >= set(labels):
            return "*not tested at the paper's length* |not run"
        evidence = f"{table['evidence']}: " + ", ".join(f"{label} {self.as_cell(name, label, head)}" for label in labels)
        verdict = "confirmed" if all(means[labels[0]] > means[label] for label in labels[1:]) else "not confirmed"
        column = self.find("column", head, table)
        first, second = (self.values(table, row, column) for label in labels[:2] for row in table["rows"] if row["label"] == label)
        if min(len(first), len(second)) >= 3:
            gap, half = (column.get("scale", 100) * value for value in compare_means(first, second))
            evidence += f"; difference from {labels[1]} {gap:+.1f}±{half:.1f}, paper {paper}"
            if verdict == "not confirmed" and gap + half < float(paper):
                verdict = "refuted"
        return f"*{verdict}* |{evidence}"

    def as_figure(self, name: str, caption: str) -> str:
        """Format a figure, or nothing if its runs are not stored."""
        return f"![{caption}]({name}.png)" if name in self.figures else ""

    def fill(self, text: str, name: str = "page.md") -> str:
        """Replace the placeholders of a text, inner ones first. The name is for errors."""

        def replace(found: re.Match[str]) -> str:
            kind, _, words = found[1].partition(": ")
            make, parts = getattr(self, f"as_{kind}", None), re.split(" > | ; ", words)
            if make is None or len(inspect.signature(make).parameters) != len(parts):
                raise UnimetricError(f"{name}: cannot read `{found[0]}`", "see the docstring of results/page.py")
            return str(make(*parts))

        while "{{" in text:
            text = re.sub(r"\{\{ ([^{}]+) \}\}", replace, text)
        return re.sub(r"\n{3,}", "\n\n", text)

    # --- files ------------------------------------------------------------------------------------------------------

    def as_csv(self) -> str:
        """Format all runs as CSV: method, metric values at the best epoch (on validation classes if there are any), and source."""
        source, lines = ("date", "commit", "added", "device", "command"), []
        for name, run in sorted(self.runs.items(), key=lambda item: (item[1]["file"], item[0])):
            settings, curve = asdict(RunConfig()) | run["settings"], run["curve"]
            method = " | ".join(settings[key] for key in ("objective", "head", "adapter", "loss", "miner", "sampler") if settings[key])
            line = {"file": run["file"], "run": name, "method": method}
            line |= {key: settings[key] for key in ("dataset", "split", "seed")} | {"epochs": run["epochs"]}
            chosen_by = [key for key in ("validation/recall(k=1)", "test/recall(k=1)", "test/harmonic") if key in curve]
            if chosen_by:
                index = find_epoch(curve, chosen_by[0], "best")
                line |= {"best_epoch" if key == "epoch" else key: values[index] for key, values in curve.items()}
            lines.append(line | {key: run.get(key, "") for key in source})
        out = io.StringIO()
        names = dict.fromkeys(key for line in lines for key in line if key not in source)
        writer = csv.DictWriter(out, [*names, *source], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return out.getvalue()

    def draw(self, folder: Path) -> None:
        """Draw the figures whose runs are stored."""
        kinds = {"curves": self.draw_curves, "shift": self.draw_shift, "points": self.draw_points}
        for name, figure in self.figures.items():
            draw = next(draw for key, draw in kinds.items() if key in figure)
            draw(folder / f"{name}.png", self.tables[figure["table"]], figure)

    def draw_curves(self, path: Path, table: Table, figure: Table) -> None:
        """Draw the learning curves of a table's runs, one panel per metric and one color per row, of all or the figure's `rows`.

        They begin after the first epochs: before them, a prompt pool is random, and other methods equal the pretrained network.
        """
        from unimetric.analysis.canvas import Canvas

        drawn: list[str] = figure.get("rows", table["labels"])
        rows = [row for row in table["rows"] if row["label"] in drawn]
        with Canvas(path, width=10, height=4, rows=1, columns=len(figure["curves"])) as panels:
            for axes, (label, metric) in zip(panels[0], figure["curves"].items(), strict=True):
                for number, row in enumerate(rows):
                    for seed, name in enumerate(row["runs"]):
                        curve = self.runs[name]["curve"]
                        points = zip(curve["epoch"], curve[in_variant(metric, row)], strict=True)
                        epochs, values = zip(*[point for point in points if point[0] and point[1] is not None], strict=True)
                        style = "-" if len(values) > 20 else ".-"
                        axes.plot(epochs, [100 * value for value in values], style, color=f"C{number}", label="" if seed else row["label"])
                axes.set(xlabel="epoch", ylabel=label)
            panels[0][0].legend(frameon=False, fontsize="small")

    def draw_points(self, path: Path, table: Table, figure: Table) -> None:
        """Draw one column of a table against another, one labeled point per row that has both."""
        from unimetric.analysis.canvas import Canvas

        (x_label, first), (y_label, second) = figure["points"].items()
        with Canvas(path, width=7, height=4.5, rows=1, columns=1) as panels:
            axes = panels[0, 0]
            points = self.points(table, first, second)
            axes.plot(*zip(*points.values(), strict=True), "o", color="C0")
            axes.margins(x=0.2)
            axes.set(xlabel=x_label, ylabel=y_label)
            axes.figure.draw_without_rendering()  # moves the axes to their final place
            taken: list[Any] = []
            for label, point in sorted(points.items(), key=lambda item: item[1]):
                text = axes.annotate(label, point, textcoords="offset points", fontsize="x-small", xytext=(4, 4))
                for x, y in ((4, 4), (4, -10), (-4, 4), (-4, -10)):  # the first place that is free, otherwise the last
                    text.xyann = (x, y)
                    text.set_horizontalalignment("left" if x > 0 else "right")
                    if not text.get_window_extent().count_overlaps(taken):
                        break
                taken.append(text.get_window_extent())

    def draw_shift(self, path: Path, table: Table, figure: Table) -> None:
        """Draw a metric against the distance of the splits, one color per row; the values of the paper are dashed."""
        from unimetric.analysis.canvas import Canvas

        column = next(column for column in table["columns"] if "ags" in column)
        with Canvas(path, width=7, height=4.5, rows=1, columns=1) as panels:
            axes = panels[0, 0]
            for number, row in enumerate(table["rows"]):
                cells = [self.values(table, row, {"metric": column["metric"], "of": key}) for key in column["ags"]]
                scores = [100 * statistics.fmean(cell) for cell in cells]
                axes.plot(list(column["ags"].values()), scores, "o-", color=f"C{number}", label=row["label"])
                if "published" in row:
                    axes.plot(figure["distances"], row["published"], "--", color=f"C{number}", linewidth=1, label=f"{row['label']}, paper")
            axes.set(xlabel="Frechet distance, train to test", ylabel=figure["shift"])
            axes.legend(frameon=False, fontsize="small", ncols=2)


def compare_means(first: list[float], second: list[float]) -> tuple[float, float]:
    """Return the difference of two means and half of its 95 % interval, for samples of different variance.

    >>> [round(value, 3) for value in compare_means([0.3, 0.5, 0.4], [0.1, 0.2, 0.3])]
    [0.2, 0.227]
    """
    errors = [statistics.variance(values) / len(values) for values in (first, second)]
    freedom = sum(errors) ** 2 / sum(error**2 / (len(values) - 1) for error, values in zip(errors, (first, second), strict=True))
    return statistics.fmean(first) - statistics.fmean(second), float(stdtrit(freedom, 0.975)) * sum(errors) ** 0.5


def in_variant(metric: str, row: Table) -> str:
    """Return the key of a metric for the row's variant of the head."""
    return metric.replace("test/", f"test {row['variant']}/") if "variant" in row else metric


def find_epoch(curve: dict[str, list[Any]], best: str, epoch: str) -> int:
    """Return the index of the `first`, `last` or `best` epoch. Only epochs after the start of training can be the best.

    >>> find_epoch({"epoch": [0, 5, 10], "test/recall": [0.9, 0.7, 0.8]}, "test/recall", "best")
    2
    """
    if epoch != "best":
        return 0 if epoch == "first" else -1
    known = [index for index, value in enumerate(curve[best]) if value is not None]
    trained = [index for index in known if curve["epoch"][index] != 0]
    return max(trained or known, key=lambda index: curve[best][index])


def show(values: list[Any], column: Table) -> str:
    """Format values: mean ± standard deviation, the range of two, or one value with its interval if it has one.

    >>> show([0.60, 0.62], {}), show([0.60, 0.62, 0.64], {}), show([0.1234], {"scale": 1, "digits": 3}), show([[0.03, 0.01]], {})
    ('60.0–62.0', '62.0±2.0', '0.123', '3.0±1.0')
    >>> show([0.6201, 0.6202], {})
    '62.0'
    """
    if None in values:
        return ""
    numbers, joint = values, "\u2013"
    if isinstance(values[0], list):
        numbers, joint = values[0], "±"
    elif len(values) == 2 or isinstance(values[0], int):
        numbers = sorted({min(values), max(values)})
    elif len(values) > 2:
        numbers, joint = [statistics.fmean(values), statistics.stdev(values)], "±"
    texts = [f"{column.get('scale', 100) * number:,.{column.get('digits', 1)}f}" for number in numbers]
    return joint.join(texts if joint == "±" else dict.fromkeys(texts))


def main() -> None:
    """Write the pages, the CSV file and the figures."""
    try:
        results = Results()
        for source, page in PAGES.items():
            write_text(DOCS / page, results.fill((HERE / source).read_text(encoding="utf-8"), source))
        write_text(HERE / "runs.csv", results.as_csv())
        results.draw(DOCS)
    except UnimetricError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
