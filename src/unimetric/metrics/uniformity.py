"""Uniformity on the sphere."""

from __future__ import annotations

import torch

from unimetric.geometry.nearest import exactly
from unimetric.geometry.space import Space
from unimetric.metrics._describes import describes


@describes
def uniformity(space: Space, *, t: float = 2.0) -> float:
    """How evenly the pictures are spread over the sphere: 0 if all in one place, the lower the more even.

    Understanding contrastive representation learning through alignment and uniformity on the hypersphere (Wang and Isola, ICML 2020).

        log of the mean over pairs i != j of  exp(-t |f_i - f_j|^2),   f unit vectors

    Every pair is looked at, some rows and columns at a time; 0 if there is no pair.

    Args:
        space: the embeddings; unit vectors are made of them in any geometry.
        t: how near two pictures must be to count.
    """
    points = space.points / space.points.norm(dim=1, keepdim=True).clamp_min(1e-6)
    side = max(1, min(4096, int((space.memory / (2 * points.element_size())) ** 0.5)))
    total = torch.zeros((), dtype=torch.float64, device=space.device)
    for top in range(0, space.size, side):
        some = points[top : top + side]
        for left in range(top, space.size, side):
            others = points[left : left + side]
            with exactly(space.device):
                near = (some @ others.T).mul_(2 * t).sub_(2 * t).exp_()
            # Blocks below the diagonal are mirrors of those above; on the diagonal itself stand the pictures with themselves.
            total += near.fill_diagonal_(0).sum(dtype=torch.float64) if left == top else 2 * near.sum(dtype=torch.float64)
    pairs = space.size * (space.size - 1)
    return float((total / pairs).log()) if pairs else 0.0
