"""Progress output: a bar on a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

#: Seconds between two progress lines if the output is not a terminal.
EVERY = 30.0


class ProgressLines:
    """Plain progress lines on stderr, at most one every `EVERY` seconds.

    A task that ends within that time prints nothing.
    """

    def __init__(self) -> None:
        self.printed = time.monotonic()
        self.begun: dict[str, tuple[float, int]] = {}
        self.last: dict[str, int] = {}

    @property
    def due(self) -> bool:
        """Whether the next `step` prints a line."""
        return time.monotonic() - self.printed >= EVERY

    def step(self, name: str, done: int, total: int, note: str = "") -> None:
        """Record the progress of a task, and print it if a line is due.

        Args:
            name: Name of the task.
            done: Number of finished items.
            total: Number of all items.
            note: Text at the end of the line.
        """
        now = time.monotonic()
        if done < self.last.get(name, 0):  # the same task starts again
            del self.begun[name]
        self.last[name] = done
        start, first = self.begun.setdefault(name, (now, done))
        if done >= total:
            del self.begun[name], self.last[name]
        elif self.due:
            self.printed = now
            with contextlib.suppress(BrokenPipeError):  # the reader has ended, as in `unimetric train 2>&1 | head -1`
                print(describe_progress(name, done, total, done - first, now - start, note), file=sys.stderr, flush=True)


def describe_progress(name: str, done: int, total: int, steps: int, seconds: float, note: str = "") -> str:
    """Format a progress line: items done, speed and time left.

    Args:
        name: Name of the task.
        done: Number of finished items.
        total: Number of all items.
        steps: Number of items finished in `seconds`. The line has no speed if it is 0.
        seconds: Time of these items in seconds.
        note: Text at the end of the line.

    >>> describe_progress("packing", 1200, 11788, 1000, 30.0)
    'packing 1,200/11,788  33.3 per second  5 min left'
    >>> describe_progress("adapting", 1, 10, 0, 0.0)
    'adapting 1/10'
    """
    words = [f"{name} {done:,}/{total:,}"]
    if steps and seconds:
        rate, unit = steps / seconds, "second"
        if rate < 0.1:
            rate, unit = rate * 3600, "hour"
        words += [f"{rate:,.1f} per {unit}", f"{_duration((total - done) * seconds / steps)} left"]
    return "  ".join(words + [note] * bool(note))


def source_table(values: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """Separate the values of single datasets, and format them as a table.

    The table has one column per dataset. Beyond 120 characters, it continues below.

    Args:
        values: Metric values by key. Those of a dataset have keys such as `test/per_source/cub200`.

    Returns:
        The other values, and the lines of the table.

    >>> source_table({"unified": 0.7, "per_source/cub200": 0.5, "per_source/sop": 0.25})
    ({'unified': 0.7}, ['  dataset     cub200     sop', '  per_source  0.5000  0.2500'])
    """
    others: dict[str, float] = {}
    rows: dict[str, dict[str, str]] = {}
    for key, value in values.items():
        if found := re.fullmatch(r"((?:\w+/)?per_source(?:\(.*?\))?)/(.*)", key):
            rows.setdefault(found[1], {})[found[2]] = f"{value:.4f}"
        else:
            others[key] = value
    first = max(map(len, ("dataset", *rows)))
    blocks: list[dict[str, int]] = [{}]  # width of each column
    for name in dict.fromkeys(name for row in rows.values() for name in row):
        size = max(len(name), 6) + 2
        if blocks[-1] and 2 + first + sum(blocks[-1].values()) + size > 120:
            blocks.append({})
        blocks[-1][name] = size
    lines = []
    for block in blocks if rows else []:
        lines.append(f"  {'dataset':<{first}}" + "".join(f"{name:>{size}}" for name, size in block.items()))
        for metric, row in rows.items():
            lines.append(f"  {metric:<{first}}" + "".join(f"{row.get(name, ''):>{size}}" for name, size in block.items()))
    return others, lines


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class _Console(Console):
    """Console that discards its output after its pipe closes: `unimetric train | head -1`.

    The work continues. The default of `rich` is to exit, without a checkpoint.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for `print` as well


class Display:
    """A progress bar on a terminal; elsewhere a plain line on stderr about every 30 seconds.

    Args:
        quiet: Whether to print nothing, as on other ranks.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = _Console(quiet=quiet, highlight=False)
        self.live = self.console.is_terminal and not quiet
        self.lines = None if self.live or quiet else ProgressLines()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not self.live,
        )
        self.tasks: dict[str, int] = {}
        self.told = 0.0

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def step(self, name: str, done: int, total: int, note: str = "") -> None:
        """Update the bar of a task, or print a line if one is due.

        Args:
            name: Name of the task.
            done: Number of finished items.
            total: Number of all items.
            note: Text next to the bar.
        """
        if self.lines is not None:
            self.lines.step(name, done, total, note)
        if not self.live:
            return
        if name not in self.tasks:
            self.tasks[name] = self.bar.add_task(name, total=total, note=note)
        self.bar.update(self.tasks[name], completed=done, total=total, note=note)  # type: ignore[arg-type]
        if done >= total:
            self.bar.remove_task(self.tasks.pop(name))  # type: ignore[arg-type]

    def due(self) -> bool:
        """Return whether to show new values: on a bar once per second.

        Reading them synchronizes with the GPU, so not at every step.
        """
        if self.lines is not None:
            return self.lines.due
        now = time.monotonic()
        if not self.live or now - self.told < 1.0:
            return False
        self.told = now
        return True

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, soft_wrap=True, markup=False)
