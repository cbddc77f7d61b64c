"""Matplotlib axes that are saved to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unimetric.files import atomic


class Canvas:
    """Context manager that returns axes, and saves the figure if no error is raised.

    Args:
        out: Output file. The format is PNG, unless the name ends in `.jpg`, `.pdf` or `.svg`.
        width, height: Size in inches.
        rows, columns: Number of axes. If both are set, the context manager returns an array of axes.
    """

    def __init__(self, out: str | Path, *, width: float, height: float, rows: int = 0, columns: int = 0) -> None:
        from matplotlib.figure import Figure  # no pyplot: no window, no global state

        self.out, self.figure = Path(out), Figure(figsize=(width, height), layout="constrained")
        self.shape = (rows, columns)

    def __enter__(self) -> Any:
        return self.figure.subplots(*self.shape, squeeze=False) if all(self.shape) else self.figure.subplots()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            with atomic(self.out) as temporary:
                ending = self.out.suffix[1:].lower()
                self.figure.savefig(temporary, format=ending if ending in ("jpg", "jpeg", "pdf", "svg") else "png", dpi=150)
