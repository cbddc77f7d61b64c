"""Axes to draw on, which become a picture file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unimetric.files import atomic


class Canvas:
    """Axes inside a `with`; on leaving it without an error the picture is written, atomically.

    Args:
        out: the file; `.jpg`, `.pdf` or `.svg` if it ends so, else a PNG.
        width, height: in inches.
        rows, columns: of axes; for more than one of them, an array of axes is given.
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
