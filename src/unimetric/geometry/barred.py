"""Gallery items that a query must not find, such as those of its own camera.

Q queries, G gallery items, R rows and B columns of a block of scores.
"""

from __future__ import annotations

from functools import cached_property

import torch
from jaxtyping import Int, Real
from torch import Tensor

#: Fraction of a block from which comparing all codes is cheaper than listing the barred pairs.
_MANY = 1 / 64


class Barred:
    """Bars each row from the columns that have its code.

    Args:
        rows: (Q,) code of each query.
        columns: (G,) code of each gallery item.
    """

    def __init__(self, rows: Int[Tensor, "Q"], columns: Int[Tensor, "G"]) -> None:
        self.rows, self.columns = rows, columns

    @cached_property
    def _sorted(self) -> tuple[Int[Tensor, "G"], Int[Tensor, "G"]]:
        codes, order = self.columns.sort(stable=True)
        return codes, order

    def take(self, rows: Int[Tensor, "R"], columns: Int[Tensor, "B"] | None = None) -> Barred:
        """Return the codes of some rows, and of some columns (default: all)."""
        return Barred(self.rows[rows], self.columns if columns is None else self.columns[columns])

    def counts(self) -> Int[Tensor, "Q"]:
        """Count the barred columns of each row."""
        codes, _ = self._sorted
        return torch.searchsorted(codes, self.rows, right=True) - torch.searchsorted(codes, self.rows)

    def fill(self, score: Real[Tensor, "R B"], value: float, *, top: int = 0, left: int = 0) -> None:
        """Write a value into the barred pairs of a block of scores.

        Args:
            score: Block of scores, changed in place.
            value: Lowest score of its type.
            top: First row of the block.
            left: First column of the block.
        """
        rows = self.rows[top : top + score.shape[0]]
        codes, order = self._sorted
        first = torch.searchsorted(codes, rows)
        size = torch.searchsorted(codes, rows, right=True) - first
        total = int(size.sum())
        if total > _MANY * len(rows) * len(codes):
            inside = score[: len(rows), : len(codes) - left]
            inside.masked_fill_(rows[:, None] == self.columns[left : left + inside.shape[1]], value)
            return
        row = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), size, output_size=total)
        position = torch.arange(total, device=rows.device) - (size.cumsum(0) - size)[row] + first[row]
        column = order[position] - left
        inside = (column >= 0) & (column < score.shape[1])
        score[row[inside], column[inside]] = value
