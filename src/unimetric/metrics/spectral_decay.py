"""Spectral decay."""

from __future__ import annotations

import torch

from unimetric.arguments import Natural
from unimetric.errors import UnimetricError
from unimetric.geometry.space import Space
from unimetric.kinds import metric


@metric(better="neither")
def spectral_decay(space: Space, *, drop_largest: Natural = 1, drop_smallest: Natural = 0, reverse: bool = False) -> float:
    """Unevenness of the directions: 0 if all are equally used, large if few dominate.

        rho = KL(U || s) = sum over i of (1/d) log((1/d) / s_i)
        s the singular values of the (N, D) embeddings, scaled to sum 1

    The matrix is not centered, so that the largest singular value mainly reflects its mean, and is
    dropped. Roth's figures do so (their code calls it rho_spectrum@2). Kan et al. do not state it;
    `drop_largest=0` keeps it. Roth's CPU path also loses the smallest: `drop_smallest=1`. A
    singular value below the rounding error of the embeddings is zero. A fraction below 1e-12 counts
    as 1e-12, so that a collapsed space has a large decay instead of an infinite one.

    Reference:
        Revisiting training strategies and generalization performance in deep metric learning (Roth
        et al., ICML 2020), section 5, footnote 3; eq. 7 of Kan et al. 2022.

    Args:
        space: Embeddings.
        drop_largest: Number of the largest singular values to exclude.
        drop_smallest: Number of the smallest singular values to exclude.
        reverse: Whether to compute KL(s || U) instead.
    """
    values = space.spectrum()
    values = values[drop_largest : len(values) - drop_smallest]
    if not len(values):
        raise UnimetricError(
            f"at least 1 of {min(space.points.shape)} singular values must remain, "
            f"got drop_largest={drop_largest} and drop_smallest={drop_smallest}",
            "use a smaller `drop_largest` or `drop_smallest`",
        )
    fraction = (values / values.sum().clamp_min(1e-300)).clamp_min(1e-12)
    even = torch.full_like(fraction, 1 / len(fraction))
    first, second = (fraction, even) if reverse else (even, fraction)
    return float((first * (first / second).log()).sum())
