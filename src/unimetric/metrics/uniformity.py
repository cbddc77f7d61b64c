"""Uniformity on the sphere."""

from __future__ import annotations

import torch

from unimetric.arguments import Positive
from unimetric.geometry.nearest import exactly
from unimetric.geometry.space import Space, scale_to_unit
from unimetric.kinds import metric


@metric(better="neither")
def uniformity(space: Space, *, t: Positive = 2.0) -> float:
    """Uniformity of the images on the sphere: 0 if all coincide, lower is more uniform.

        log of the mean over pairs i != j of  exp(-t |f_i - f_j|^2),   f unit vectors

    Every pair is computed, in blocks of rows and columns. 0 if there is no pair.

    Reference:
        Understanding contrastive representation learning through alignment and uniformity on the
        hypersphere (Wang and Isola, ICML 2020).

    Args:
        space: Embeddings, normalized to unit vectors in any geometry.
        t: Inverse scale: larger values count only closer images.
    """
    points = scale_to_unit(space.points)
    side = max(1, min(4096, int((space.memory / (2 * points.element_size())) ** 0.5)))
    total = torch.zeros((), dtype=torch.float64, device=space.device)
    for top in range(0, space.size, side):
        some = points[top : top + side]
        for left in range(top, space.size, side):
            others = points[left : left + side]
            with exactly(space.device):
                near = (some @ others.T).mul_(2 * t).sub_(2 * t).exp_()
            if left == top:  # the diagonal compares images with themselves
                total += near.fill_diagonal_(0).sum(dtype=torch.float64)
            else:  # also counts the mirrored block below the diagonal
                total += 2 * near.sum(dtype=torch.float64)
    pairs = space.size * (space.size - 1)
    return float((total / pairs).log()) if pairs else 0.0
