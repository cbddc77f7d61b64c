"""The results as tables: for the page, and as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import html
import io
import math
from dataclasses import dataclass

from unimetric.report.numbers import Method, Published, direction, is_structure, measured, published, shown


@dataclass(frozen=True)
class Cell:
    """One number of a table.

    Args:
        mean: as it is shown.
        half: half of the interval, as it is shown; empty for a single run.
        best: whether no method has a better one.
        paper: what a paper has.
    """

    mean: str
    half: str
    best: bool
    paper: Published | None


@dataclass(frozen=True)
class Results:
    """The methods that were measured on the same classes.

    Args:
        dataset, split: which classes.
        metrics: the columns.
        rows: name of the method, number of seeds, one cell a metric.
    """

    dataset: str
    split: str
    metrics: list[str]
    rows: list[tuple[str, int, list[Cell]]]


def results(found: list[Method]) -> list[Results]:
    """A table for each dataset and split, in the order of the runs."""
    tables = []
    for task in dict.fromkeys(method.task for method in found):
        here = [method for method in found if method.task == task]
        metrics = measured(here)
        best = {metric: _best(here, metric) for metric in metrics}
        rows = []
        for method in here:
            cells = [
                Cell(
                    shown(metric, method.mean(metric)),
                    shown(metric, method.half(metric)),
                    not is_structure(metric) and len(here) > 1 and method.mean(metric) == best[metric],
                    published(method, metric),
                )
                for metric in metrics
            ]
            rows.append((method.name, len(method.runs), cells))
        tables.append(Results(*task, metrics, rows))
    return tables


def _best(here: list[Method], metric: str) -> float:
    sign = direction(here, metric)
    return max((mean for method in here if not math.isnan(mean := method.mean(metric))), key=lambda mean: sign * mean, default=math.nan)


def _plain(cell: Cell) -> str:
    return cell.mean + (f" ± {cell.half}" if cell.half else "")


def as_html(table: Results) -> str:
    """A table for the page; a click on a heading sorts it."""
    head = "".join(f"<th>{html.escape(metric)}</th>" for metric in table.metrics)
    lines = []
    for name, seeds, cells in table.rows:
        columns = "".join(
            f'<td data-value="{cell.mean}">'
            + (f"<b>{_plain(cell)}</b>" if cell.best else _plain(cell))
            + (f' <span class="paper" title="{html.escape(cell.paper.source)}">{html.escape(cell.paper.text)}</span>' if cell.paper else "")
            + "</td>"
            for cell in cells
        )
        lines.append(f"<tr><td>{html.escape(name)}</td><td>{seeds}</td>{columns}</tr>")
    title = html.escape(f"{table.dataset}, {table.split}")
    head = f"<thead><tr><th>method</th><th>seeds</th>{head}</tr></thead>"
    return f'<h3>{title}</h3><div class="wide"><table class="results">{head}<tbody>{"".join(lines)}</tbody></table></div>'


def as_markdown(tables: list[Results]) -> str:
    """Every table, the best in bold and a paper's value in brackets."""
    parts = []
    for table in tables:
        lines = [f"## {table.dataset}, {table.split}", "", "| method | seeds | " + " | ".join(table.metrics) + " |"]
        lines.append("|---" * (2 + len(table.metrics)) + "|")
        for name, seeds, cells in table.rows:
            texts = [
                (f"**{_plain(cell)}**" if cell.best else _plain(cell)) + (f" ({cell.paper.text})" if cell.paper else "") for cell in cells
            ]
            lines.append(f"| {name.replace('|', chr(92) + '|')} | {seeds} | " + " | ".join(texts) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def as_csv(tables: list[Results]) -> str:
    """One line a method and metric, for spreadsheets."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["dataset", "split", "method", "seeds", "metric", "mean", "half_interval", "paper", "source"])
    for table in tables:
        for name, seeds, cells in table.rows:
            for metric, cell in zip(table.metrics, cells, strict=True):
                paper = (cell.paper.text, cell.paper.source) if cell.paper else ("", "")
                writer.writerow([table.dataset, table.split, name, seeds, metric, cell.mean, cell.half, *paper])
    return out.getvalue()


_LATEX = str.maketrans({"_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}", "~": " ", "^": " ", "\\": "/"})


def as_latex(tables: list[Results]) -> str:
    """A `tabular` for each table, for a paper that loads booktabs."""
    parts = []
    for table in tables:
        lines = [f"% {table.dataset}, {table.split}", r"\begin{tabular}{l" + "r" * len(table.metrics) + "}", r"\toprule"]
        lines += ["method & " + " & ".join(metric.translate(_LATEX) for metric in table.metrics) + r" \\", r"\midrule"]
        for name, _, cells in table.rows:
            texts = []
            for cell in cells:
                text = cell.mean + (rf" \pm {cell.half}" if cell.half else "")
                text = (rf"$\mathbf{{{text}}}$" if cell.best else f"${text}$") if cell.mean else ""
                texts.append(text + (f" ({cell.paper.text.translate(_LATEX)})" if cell.paper else ""))
            lines.append(f"{name.translate(_LATEX)} & " + " & ".join(texts) + r" \\")
        parts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""]))
    return "\n".join(parts)
