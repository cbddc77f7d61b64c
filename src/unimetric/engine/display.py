"""What a person sees while a run works: a bar on a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """A bar with loss, pictures a second, recall and time left.

    Args:
        quiet: show nothing (other ranks, tests).
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet, highlight=False)
        self.live = self.console.is_terminal and not quiet
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.bar.stop()

    def step(self, name: str, done: int, total: int, note: str = "") -> None:
        """Move a bar, or make it."""
        if not self.live:
            return
        if name not in self.tasks:
            self.tasks[name] = self.bar.add_task(name, total=total, note=note)
        self.bar.update(self.tasks[name], completed=done, total=total, note=note)  # type: ignore[arg-type]
        if done >= total:
            self.bar.remove_task(self.tasks.pop(name))  # type: ignore[arg-type]

    def due(self, seconds: float = 1.0) -> bool:
        """Whether it is time to show numbers again; reading them makes the device wait, so not every step."""
        now = time.monotonic()
        if not self.live or now - self.told < seconds:
            return False
        self.told = now
        return True

    def line(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, soft_wrap=True, markup=False)
