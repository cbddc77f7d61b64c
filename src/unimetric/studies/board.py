"""Display of a study: a table on a terminal, elsewhere one line per event."""

from __future__ import annotations

import json
import time

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unimetric.runs.display import ProgressLines
from unimetric.runs.storage import read
from unimetric.studies.grid import Run

_STYLES = {"done": "green", "failed": "red", "running": "yellow", "waiting": "dim", "stopped": "magenta"}


class Board:
    """The state of every run of a study.

    Args:
        runs: Runs of the study.
        place: Folder of the run folders, or its fsspec URL.
        quiet: Whether to print nothing.
    """

    def __init__(self, runs: list[Run], place: str, *, quiet: bool = False) -> None:
        self.place, self.quiet = place, quiet
        self.names = {run.config.run_id: "  ".join(run.labels.values()) or "the run" for run in runs}
        self.epochs = {run.config.run_id: run.config.epochs for run in runs}
        self.states = dict.fromkeys(self.names, "waiting")
        self.notes = dict.fromkeys(self.names, "")
        self.begun: dict[str, float] = {}
        self.console = Console(quiet=quiet, highlight=False)
        self.live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal and not quiet else None
        self.lines = None if self.live or quiet else ProgressLines()

    def __enter__(self) -> Board:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.show()
        if self.live is not None:
            self.live.stop()

    def set(self, run_id: str, state: str, note: str = "") -> None:
        """Set the state of a run, and show it."""
        if state == "running":
            self.begun[run_id] = time.monotonic()
        if state == "done":
            note = note or self._best(run_id)
        self.states[run_id], self.notes[run_id] = state, note
        if self.live is None:
            self.console.print(f"{state:<8} {run_id}  {self.names[run_id]}  {note}".rstrip(), soft_wrap=True, markup=False)
        self.show()

    def show(self) -> None:
        """Draw the table again, with the progress of the running runs."""
        if self.live is None:
            self._show_line()
            return
        table = Table(box=None, pad_edge=False)
        for column in ("run", "", "state", ""):
            table.add_column(column, overflow="ellipsis", no_wrap=True)
        # If there are more runs than lines, running and failed ones come first.
        order = sorted(self.names, key=lambda each: ("running", "failed", "stopped", "waiting", "done").index(self.states[each]))
        room = max(4, self.console.height - 4)
        for run_id in order[:room]:
            state = self.states[run_id]
            note = self._progress(run_id) if state == "running" else self.notes[run_id]
            table.add_row(run_id, self.names[run_id], Text(state, style=_STYLES[state]), note)
        table.caption = self.summary() + (f"   (and {len(order) - room} more)" if len(order) > room else "")
        self.live.update(table, refresh=True)

    def summary(self) -> str:
        """Return the number of runs per state."""
        return ", ".join(f"{count} {state}" for state in _STYLES if (count := list(self.states.values()).count(state)))

    def _show_line(self) -> None:
        if self.lines is None or "running" not in self.states.values() or (self.lines.begun and not self.lines.due):
            return
        counted = [run_id for run_id, state in self.states.items() if state != "failed"]
        done = sum(self._epoch(run_id) for run_id in counted)
        self.lines.step("epochs", done, sum(self.epochs[run_id] for run_id in counted), self.summary())

    def _epoch(self, run_id: str) -> int:
        if self.states[run_id] == "done":
            return self.epochs[run_id]
        return last_line(self.place, run_id).get("epoch", 0) if self.states[run_id] == "running" else 0

    def _progress(self, run_id: str) -> str:
        seconds = int(time.monotonic() - self.begun.get(run_id, time.monotonic()))
        line = last_line(self.place, run_id)
        if not line:
            return f"{seconds} s"
        memory = f"  {line['peak_memory_gib']:.1f} GiB" if "peak_memory_gib" in line else ""
        return f"epoch {line.get('epoch', 0)}/{self.epochs[run_id]}  {_number(line)}{memory}  {seconds} s"

    def _best(self, run_id: str) -> str:
        try:
            return _number(json.loads(read(self.place, f"{run_id}/done") or b"{}"))
        except ValueError:
            return ""


def last_line(place: str, run_id: str) -> dict:
    """Return the last line of a run's log, or nothing if there is none or it is incomplete."""
    lines = (read(place, f"{run_id}/metrics.jsonl") or b"").decode(errors="replace").splitlines()
    try:
        return json.loads(lines[-1])
    except (ValueError, IndexError):
        return {}


def _number(line: dict) -> str:
    return next((f"{key} {value:.4f}" for key, value in line.items() if key.startswith(("validation/", "test/"))), "")
