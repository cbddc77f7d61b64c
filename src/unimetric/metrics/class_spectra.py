"""Singular values within classes."""

from __future__ import annotations

import torch

from unimetric.arguments import Count
from unimetric.geometry.space import Space
from unimetric.kinds import metric


@metric(better="neither")
def class_spectra(space: Space, *, top: Count = 8) -> dict[str, float]:
    """Fractions of the largest singular values of each class, averaged over classes.

        mean over classes of  s / sum(s)
        s the singular values of the (n_c, D) embeddings of a class, sorted

    There is no published code. A class of fewer images than `top` has fractions of zero at the end.
    The values come from the (n_c, n_c) or (D, D) products in float64, many classes at a time, exact
    to about 1e-8.

    Reference:
        Revisiting training strategies and generalization performance in deep metric learning (Roth
        et al., ICML 2020), figure 10, after Verma et al., ICML 2019.

    Args:
        space: Embeddings.
        top: Number of singular values to return. The largest has the key "1".
    """
    order = space.labels.argsort(stable=True)
    count = torch.bincount(space.labels, minlength=space.classes)
    start = count.cumsum(0) - count
    by_size = count.argsort(descending=True, stable=True)
    dim = space.points.shape[1]
    total = torch.zeros(top, dtype=torch.float64, device=space.device)
    sizes, done = count[by_size].tolist(), 0
    while done < space.classes:
        largest = sizes[done]
        # Batched solvers of small matrices need a large workspace: some hundred kilobytes per matrix.
        some = by_size[done : done + max(1, min(512, space.memory // (32 * largest * dim)))]
        done += len(some)
        index = torch.arange(largest, device=space.device)
        inside = index < count[some, None]
        rows = order[(start[some, None] + index).clamp_max(space.size - 1)]
        points = space.points[rows].to(torch.float64) * inside[:, :, None]  # (classes, largest, D), padded with zero rows
        square = points @ points.mT if largest < dim else points.mT @ points
        values = torch.linalg.eigvalsh(square).flip(1).clamp_min(0).sqrt()
        fractions = values / values.sum(1, keepdim=True).clamp_min(1e-300)
        width = min(top, fractions.shape[1])
        total[:width] += fractions[:, :width].sum(0)
    return {str(number + 1): value for number, value in enumerate((total / space.classes).tolist())}
