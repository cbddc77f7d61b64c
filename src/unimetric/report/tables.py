"""Result tables as HTML, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import html
import io
import math
from dataclasses import dataclass

from unimetric.report.numbers import Method, Published, direction, format_value, is_structure, measured, published


@dataclass(frozen=True)
class Cell:
    """One result of a table, formatted.

    Args:
        mean: Mean over the seeds.
        half: Half of the confidence interval. Empty for fewer than three seeds.
        low, high: Range over the seeds. Empty for a single seed.
        best: Whether no method of the table has a better mean.
        paper: Value of a paper.
    """

    mean: str
    half: str
    low: str
    high: str
    best: bool
    paper: Published | None


@dataclass(frozen=True)
class Results:
    """Results of the methods on one dataset and split.

    Args:
        dataset, split: Spec strings of dataset and split.
        metrics: Metric of each column.
        rows: Name of the method, number of seeds, and one cell per metric.
    """

    dataset: str
    split: str
    metrics: list[str]
    rows: list[tuple[str, int, list[Cell]]]


def results(found: list[Method]) -> list[Results]:
    """Return one table per dataset and split, in the order of the runs."""
    tables = []
    for task in dict.fromkeys(method.task for method in found):
        here = [method for method in found if method.task == task]
        metrics = measured(here)
        best = {metric: _best(here, metric) for metric in metrics}
        rows = []
        for method in here:
            cells = [_cell(method, metric, best=len(here) > 1 and method.mean(metric) == best[metric]) for metric in metrics]
            rows.append((method.name, len(method.runs), cells))
        tables.append(Results(*task, metrics, rows))
    return tables


def _cell(method: Method, metric: str, *, best: bool) -> Cell:
    low, high = method.range(metric) if len(method.runs) > 1 else (math.nan, math.nan)
    return Cell(
        mean=format_value(metric, method.mean(metric)),
        half=format_value(metric, method.half(metric)),
        low=format_value(metric, low),
        high=format_value(metric, high),
        best=best and not is_structure(metric),
        paper=published(method, metric),
    )


def _best(here: list[Method], metric: str) -> float:
    means = [method.mean(metric) for method in here]
    valid = [mean for mean in means if not math.isnan(mean)]
    if not valid:
        return math.nan
    return max(valid) if direction(here, metric) > 0 else min(valid)


def _plain(cell: Cell) -> str:
    if cell.half:
        return f"{cell.mean} ± {cell.half}"
    return f"{cell.mean} [{cell.low}, {cell.high}]" if cell.low else cell.mean


def _heading(metric: str) -> str:
    return metric if is_structure(metric) else f"{metric} (%)"


def as_html(table: Results) -> str:
    """Return a table for the HTML report. A click on a heading sorts the rows."""
    head = "".join(f"<th>{html.escape(_heading(metric))}</th>" for metric in table.metrics)
    lines = []
    for name, seeds, cells in table.rows:
        columns = "".join(map(_cell_html, cells))
        lines.append(f"<tr><td>{html.escape(name)}</td><td>{seeds}</td>{columns}</tr>")
    title = html.escape(f"{table.dataset}, {table.split}")
    head = f"<thead><tr><th>method</th><th>seeds</th>{head}</tr></thead>"
    return f'<h3>{title}</h3><div class="wide"><table class="results">{head}<tbody>{"".join(lines)}</tbody></table></div>'


def _cell_html(cell: Cell) -> str:
    mean = f"<b>{cell.mean}</b>" if cell.best else cell.mean
    spread = _plain(cell).removeprefix(cell.mean)
    text = f'{mean}<span class="spread">{spread}</span>' if spread else mean
    if cell.paper:
        text += f' <span class="paper" title="{html.escape(cell.paper.source)}">{html.escape(cell.paper.text)}</span>'
    return f'<td data-value="{cell.mean}">{text}</td>'


def as_markdown(tables: list[Results]) -> str:
    """Return all tables, with the best value in bold and the value of a paper in parentheses."""
    parts = []
    for table in tables:
        lines = [f"## {table.dataset}, {table.split}", "", "| method | seeds | " + " | ".join(map(_heading, table.metrics)) + " |"]
        lines.append("|---" * (2 + len(table.metrics)) + "|")
        for name, seeds, cells in table.rows:
            texts = [
                (f"**{_plain(cell)}**" if cell.best else _plain(cell)) + (f" ({cell.paper.text})" if cell.paper else "") for cell in cells
            ]
            lines.append(f"| {name.replace('|', chr(92) + '|')} | {seeds} | " + " | ".join(texts) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def as_csv(tables: list[Results]) -> str:
    """Return one line per method and metric, for spreadsheets."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["dataset", "split", "method", "seeds", "metric", "mean", "half_interval", "paper", "source", "low", "high", "unit"])
    for table in tables:
        for name, seeds, cells in table.rows:
            for metric, cell in zip(table.metrics, cells, strict=True):
                paper = (cell.paper.text, cell.paper.source) if cell.paper else ("", "")
                unit = "" if is_structure(metric) else "percent"
                writer.writerow([table.dataset, table.split, name, seeds, metric, cell.mean, cell.half, *paper, cell.low, cell.high, unit])
    return out.getvalue()


_LATEX = str.maketrans({"_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}", "~": " ", "^": " ", "\\": "/"})


def as_latex(tables: list[Results]) -> str:
    """Return one `tabular` per table. It requires the package booktabs."""
    parts = []
    for table in tables:
        lines = [f"% {table.dataset}, {table.split}", r"\begin{tabular}{l" + "r" * len(table.metrics) + "}", r"\toprule"]
        lines += ["method & " + " & ".join(_heading(metric).translate(_LATEX) for metric in table.metrics) + r" \\", r"\midrule"]
        for name, _, cells in table.rows:
            texts = []
            for cell in cells:
                text = _plain(cell).replace("±", r"\pm")
                text = (rf"$\mathbf{{{text}}}$" if cell.best else f"${text}$") if cell.mean else ""
                texts.append(text + (f" ({cell.paper.text.translate(_LATEX)})" if cell.paper else ""))
            lines.append(f"{name.translate(_LATEX)} & " + " & ".join(texts) + r" \\")
        parts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""]))
    return "\n".join(parts)
