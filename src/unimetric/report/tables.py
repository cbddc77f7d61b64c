"""Result tables as HTML, Markdown, CSV and LaTeX."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace

from unimetric.report.escape import csv_text, for_csv, for_html, for_latex, for_markdown, one_line
from unimetric.report.numbers import Method, direction, format_value, is_structure, judges, measured, raw_backbones
from unimetric.report.published import Published, published


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
        rows: Name of the method, number of seeds, and one cell per metric. A raw backbone with pretrained weights
            has no seeds.
        notes: Sentences below the table.
    """

    dataset: str
    split: str
    metrics: list[str]
    rows: list[tuple[str, int, list[Cell]]]
    notes: list[str] = field(default_factory=list)


def results(found: list[Method]) -> list[Results]:
    """Return one table per dataset and split, in the order of the runs.

    The last rows are the backbones before training, without head and adapter, if runs have recorded them.
    """
    tables = []
    for task in dict.fromkeys(method.task for method in found):
        here = [method for method in found if method.task == task]
        raw = raw_backbones(here)
        every = [*here, *raw]
        metrics = measured(here)
        best = {metric: _best(every, metric) for metric in metrics}
        rows = []
        for method in every:
            cells = [_cell(method, metric, best=len(every) > 1 and method.mean(metric) == best[metric]) for metric in metrics]
            rows.append((method.name, len(method.runs), cells))
        for number in range(len(here), len(every)):
            name, seeds, cells = rows[number]
            rows[number] = name, seeds if seeds > 1 else 0, [replace(cell, paper=None) for cell in cells]
        tables.append(Results(*task, metrics, rows, [*_notes(here, metrics), *_gain_notes(here), *_paper_notes(rows), *_epoch_notes(here)]))
    return tables


def _notes(here: list[Method], metrics: list[str]) -> list[str]:
    """Return a sentence per method with runs that are best untrained or as raw backbone."""
    judge = next(iter(judges(metrics)), "")
    sign = direction(here, judge)
    notes = []
    for method in here:
        runs = [run for run in method.runs if run.raw]
        untrained = [run for run in runs if run.best["epoch"] == 0 and len(run.lines) > 1]
        worse = [run for run in runs if run in untrained or sign * run.value(judge) <= sign * run.raw_value(judge)]
        if worse:
            value = format_value(judge, statistics.fmean(run.value(judge) for run in worse))
            raw = format_value(judge, statistics.fmean(run.raw_value(judge) for run in worse))
            some = f" in {len(worse)} of {len(runs)} runs" if len(runs) > 1 else ""
            epoch = "epoch 0, before the first step" if len(untrained) == len(worse) else "the best epoch"
            notes.append(f"{method.name}: training did not help{some}: {judge} {value} at {epoch}, {raw} of the raw backbone")
    return notes


def _gain_notes(here: list[Method]) -> list[str]:
    """Return a sentence per method and dataset with the gain over the untrained network.

    One run has its interval over classes. Several seeds have the range of their gains.
    """
    notes = []
    for method in here:
        names = dict.fromkeys(name for run in method.runs for name in run.best.get("gain", {}))
        for name in names:
            gains = [run.best["gain"][name] for run in method.runs if name in run.best.get("gain", {})]
            metric, values = gains[0]["metric"], [each["gain"] for each in gains]
            if len(gains) > 1:
                ends = f", {100 * min(values):+.1f} to {100 * max(values):+.1f} over {len(gains)} seeds"
            elif "from" in gains[0]:
                ends = f", 95% interval {100 * gains[0]['from']:+.1f} to {100 * gains[0]['to']:+.1f}"
            else:
                ends = ""
            worse = "; the run ends below it" if statistics.fmean(values) < 0 else ""
            place = "its test classes" if name == "test" else name
            mean = 100 * statistics.fmean(values)
            notes.append(f"{method.name}: gain over the untrained network on {place}: {metric} {mean:+.1f} points{ends}{worse}")
    return notes


def _paper_notes(rows: list[tuple[str, int, list[Cell]]]) -> list[str]:
    """Return one sentence per method and table of a paper whose settings differ."""
    notes: dict[str, None] = {}
    for name, _, cells in rows:
        for cell in cells:
            if cell.paper and cell.paper.differs:
                notes[f"* {name}: {cell.paper.source} has other settings: {'; '.join(cell.paper.differs)}"] = None
    return list(notes)


def _epoch_notes(here: list[Method]) -> list[str]:
    """Return a sentence with the best epochs of methods with several seeds.

    It is the column "max. epoch" of Roth et al. 2020.
    """
    parts = []
    for method in here:
        epochs = [float(run.best["epoch"]) for run in method.runs if len(run.lines) > 1]
        if len(epochs) > 1:
            parts.append(f"{method.name} {statistics.fmean(epochs):.1f} ± {statistics.stdev(epochs):.1f}")
    return [f"best epoch, mean and standard deviation over seeds: {'; '.join(parts)}"] if parts else []


def _paper_text(paper: Published) -> str:
    """Return the value of a paper, with an asterisk if the run has other settings."""
    return paper.text + "*" * bool(paper.differs)


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
    head = "".join(f"<th>{for_html(_heading(metric))}</th>" for metric in table.metrics)
    lines = []
    for name, seeds, cells in table.rows:
        columns = "".join(map(_cell_html, cells))
        lines.append(f"<tr><td>{for_html(name)}</td><td>{seeds or ''}</td>{columns}</tr>")
    title = for_html(f"{table.dataset}, {table.split}")
    head = f"<thead><tr><th>method</th><th>seeds</th>{head}</tr></thead>"
    notes = "".join(f'<p class="note">{for_html(note)}</p>' for note in table.notes)
    return f'<h3>{title}</h3><div class="wide"><table class="results">{head}<tbody>{"".join(lines)}</tbody></table></div>{notes}'


def _cell_html(cell: Cell) -> str:
    mean = f"<b>{cell.mean}</b>" if cell.best else cell.mean
    spread = _plain(cell).removeprefix(cell.mean)
    text = f'{mean}<span class="spread">{spread}</span>' if spread else mean
    if cell.paper:
        title = "; ".join([cell.paper.source, *(f"differs: {each}" for each in cell.paper.differs)])
        text += f' <span class="paper" title="{for_html(title)}">{for_html(_paper_text(cell.paper))}</span>'
    return f'<td data-value="{cell.mean}">{text}</td>'


def as_markdown(tables: list[Results]) -> str:
    """Return all tables, with the best value in bold and the value of a paper in parentheses."""
    parts = []
    for table in tables:
        lines = [f"## {for_markdown(f'{table.dataset}, {table.split}')}", ""]
        lines.append("| method | seeds | " + " | ".join(for_markdown(_heading(metric)) for metric in table.metrics) + " |")
        lines.append("|---" * (2 + len(table.metrics)) + "|")
        for name, seeds, cells in table.rows:
            texts = []
            for cell in cells:
                text = f"**{_plain(cell)}**" if cell.best else _plain(cell)
                texts.append(text + (f" ({_paper_text(cell.paper)})" if cell.paper else ""))
            lines.append(f"| {for_markdown(name)} | {seeds or ''} | " + " | ".join(texts) + " |")
        lines += [line for note in table.notes for line in ("", for_markdown(note))]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def as_csv(tables: list[Results]) -> str:
    """Return one line per method and metric, for spreadsheets."""
    names = ("dataset", "split", "method", "seeds", "metric", "mean", "half_interval", "paper", "source", "low", "high", "unit", "differs")
    rows: list[tuple[object, ...]] = [names]
    for table in tables:
        for name, seeds, cells in table.rows:
            for metric, cell in zip(table.metrics, cells, strict=True):
                paper = (cell.paper.text, cell.paper.source) if cell.paper else ("", "")
                differs = "; ".join(cell.paper.differs) if cell.paper else ""
                unit = "" if is_structure(metric) else "percent"
                texts = map(for_csv, (table.dataset, table.split, name))
                rows.append((*texts, seeds, for_csv(metric), cell.mean, cell.half, *paper, cell.low, cell.high, unit, for_csv(differs)))
    return csv_text(rows)


def as_latex(tables: list[Results]) -> str:
    """Return one `tabular` per table. It requires the package booktabs."""
    parts = []
    for table in tables:
        lines = [f"% {one_line(f'{table.dataset}, {table.split}')}", r"\begin{tabular}{l" + "r" * len(table.metrics) + "}", r"\toprule"]
        lines += ["method & " + " & ".join(for_latex(_heading(metric)) for metric in table.metrics) + r" \\", r"\midrule"]
        for name, _, cells in table.rows:
            texts = []
            for cell in cells:
                text = _plain(cell).replace("±", r"\pm")
                text = (rf"$\mathbf{{{text}}}$" if cell.best else f"${text}$") if cell.mean else ""
                texts.append(text + (f" ({for_latex(_paper_text(cell.paper))})" if cell.paper else ""))
            lines.append(f"{for_latex(name)} & " + " & ".join(texts) + r" \\")
        notes = [f"% {one_line(note)}" for note in table.notes]
        parts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}", *notes, ""]))
    return "\n".join(parts)
