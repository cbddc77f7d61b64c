"""Singular values within classes."""

from __future__ import annotations

import torch

from unimetric.errors import UnimetricError
from unimetric.geometry.space import Space
from unimetric.metrics._describes import describes


@describes
def class_spectra(space: Space, *, top: int = 8) -> dict[str, float]:
    """How the directions within a class are used: the shares of its largest singular values, averaged over classes.

    Revisiting training strategies and generalization performance in deep metric learning (Roth et al., ICML 2020), figure 10, after
    Verma et al., ICML 2019.

        mean over classes of  s / sum(s),   s the singular values of the (n_c, D) embeddings of a class, sorted

    There is no published code: a class of fewer pictures than `top` has shares of zero at the end. Through the (n_c, n_c) or (D, D)
    products in float64, many classes at a time, which is exact to about 1e-8.

    Args:
        space: the embeddings.
        top: how many singular values are given, the largest having the key "1".
    """
    order = space.labels.argsort(stable=True)
    count = torch.bincount(space.labels, minlength=space.classes)
    start = count.cumsum(0) - count
    by_size = count.argsort(descending=True, stable=True)
    dim = space.points.shape[1]
    if top < 1:
        raise UnimetricError(f"class_spectra: `top` is {top}", "write how many singular values are given, 1 at least")
    total = torch.zeros(top, dtype=torch.float64, device=space.device)
    sizes, done = count[by_size].tolist(), 0
    while done < space.classes:
        largest = sizes[done]
        # Solvers of many small matrices take much room of their own: some hundred kilobytes each.
        some = by_size[done : done + max(1, min(512, space.memory // (32 * largest * dim)))]
        done += len(some)
        place = torch.arange(largest, device=space.device)
        inside = place < count[some, None]
        rows = order[(start[some, None] + place).clamp_max(space.size - 1)]
        points = space.points[rows].to(torch.float64) * inside[:, :, None]  # (classes, largest, D), zero rows where a class has ended
        square = points @ points.mT if largest < dim else points.mT @ points
        values = torch.linalg.eigvalsh(square).flip(1).clamp_min(0).sqrt()
        shares = values / values.sum(1, keepdim=True).clamp_min(1e-300)
        width = min(top, shares.shape[1])
        total[:width] += shares[:, :width].sum(0)
    return {str(number + 1): value for number, value in enumerate((total / space.classes).tolist())}
