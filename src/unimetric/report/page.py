"""The HTML report: one file that loads nothing from the network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from unimetric.errors import UnimetricError, counted
from unimetric.files import write_text
from unimetric.report.escape import for_html, for_script
from unimetric.report.figures import correlation_plots, curves, galleries, shift_plots, spectra
from unimetric.report.folders import Record, read_runs
from unimetric.report.numbers import Method, at_own_epochs, methods
from unimetric.report.tables import Results, as_csv, as_html, as_latex, as_markdown, results


def report(
    places: list[Path],
    out: str | Path,
    *,
    galleries: int = 24,
    own_epochs: bool = False,
    failed: Sequence[tuple[Path, str]] = (),
) -> list[tuple[Path, str]]:
    """Write an HTML report, and its tables next to it as `.md`, `.csv` and `.tex`.

    Args:
        places: Run folders, or folders of run folders.
        out: Output file with the extension `.html`.
        galleries: Number of runs with neighbors and a map, best first.
        own_epochs: Whether each metric is reported at its own best epoch on the test classes, as in Roth et al. 2020, instead of
            the run's best epoch.
        failed: Folders whose images could not be embedded, with the reason.

    Returns:
        Skipped folders and files with the reason.
    """
    out = Path(out)
    if out.suffix in _TABLES:
        raise UnimetricError(f"`--out` must end in .html, got {out}: a table is saved there", f"use `--out {out.with_suffix('.html')}`")
    records, skipped = read_runs(places)
    read = {record.folder for record in records}
    skipped += [(folder, reason) for folder, reason in failed if folder in read]  # others are listed for another reason
    if not records:
        named = "; ".join(f"{folder}: {reason}" for folder, reason in skipped[:3]) or "empty"
        raise UnimetricError(f"no finished run in {', '.join(map(str, places))} ({named})", "finish a run with `unimetric train`")
    found = methods([at_own_epochs(record) for record in records] if own_epochs else records)
    tables = results(found)
    write_text(out, page(found, tables, skipped, most=galleries, own_epochs=own_epochs))
    for ending, written in _TABLES.items():
        write_text(out.with_suffix(ending), written(tables))
    return skipped


_PAPERS = (
    'Values of a paper are <span class="paper">in this color</span>; hover to see the source. '
    "An asterisk marks runs with other settings than the paper's, which are listed below the table."
)

_TABLES = {".md": as_markdown, ".csv": as_csv, ".tex": as_latex}


def page(found: list[Method], tables: list[Results], skipped: list[tuple[Path, str]], *, most: int, own_epochs: bool = False) -> str:
    """Return the HTML of the report."""
    best, thumbnails = galleries(found, most)
    data = {
        "curves": curves(found),
        "shift": shift_plots(found),
        "structure": correlation_plots(found),
        "spectra": spectra(found),
        "galleries": best,
        "thumbnails": thumbnails,
    }
    records = [run for method in found for run in method.runs]
    available = sum(bool(run.gallery) for run in records)
    note = f"The {len(best)} best of {available} runs with images." if available > len(best) else ""
    here = Path(__file__)
    fields = {
        "STYLE": here.with_name("page.css").read_text(encoding="utf-8"),
        "SCRIPT": here.with_name("page.js").read_text(encoding="utf-8"),
        "SUMMARY": for_html(
            f"{counted(len(records), 'run')}, {counted(len(found), 'method')}, on {', '.join(sorted({method.task[0] for method in found}))}"
        ),
        "TABLES": "".join(as_html(table) for table in tables),
        "PAPERS": _PAPERS if any(cell.paper for table in tables for _, _, cells in table.rows for cell in cells) else "",
        "EPOCHS": "Each metric at its own best epoch on the test classes." if own_epochs else "All metrics at the run's best epoch.",
        "NOTE": for_html(note),
        "SKIPPED": _skipped_list(skipped),
        "RUNS": "".join(_details(run) for run in records),
        "DATA": for_script(data),
    }
    text = here.with_name("page.html").read_text(encoding="utf-8")
    first, *rest = text.split("{{")
    return first + "".join(fields[piece.partition("}}")[0]] + piece.partition("}}")[2] for piece in rest)


def _skipped_list(skipped: list[tuple[Path, str]]) -> str:
    if not skipped:
        return ""
    lines = "".join(f"<li><code>{for_html(str(folder))}</code>: {for_html(reason)}</li>" for folder, reason in skipped)
    return f'<section id="skipped"><h2>Skipped folders and files</h2><ul>{lines}</ul></section>'


def _details(run: Record) -> str:
    settings = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in run.settings.items())
    environment = "".join(f"{key}: {value}\n" for key, value in run.environment.items())
    title = for_html(f"{run.run_id}  {', '.join(run.labels.values()) or run.folder.name}")
    return f"<details><summary>{title}</summary><pre>{for_html(settings)}</pre><pre>{for_html(environment)}</pre></details>"
