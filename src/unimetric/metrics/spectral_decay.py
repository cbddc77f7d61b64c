"""Spectral decay."""

from __future__ import annotations

import torch

from unimetric.errors import UnimetricError
from unimetric.geometry.space import Space
from unimetric.metrics._describes import describes


@describes
def spectral_decay(space: Space, *, drop_largest: int = 1, drop_smallest: int = 0, reverse: bool = False) -> float:
    """How unevenly the directions of the space are used: 0 if all alike, large if few of them hold everything.

    Revisiting training strategies and generalization performance in deep metric learning (Roth et al., ICML 2020), section 5, footnote 3;
    eq. 7 of Kan et al. 2022.

        rho = KL(U || s) = sum over i of (1/d) log((1/d) / s_i),   s the singular values of the (N, D) embeddings, scaled to sum 1

    The matrix is not centred, so that the largest singular value is about its mean, and is dropped. Roth's figures do so (their code calls
    it rho_spectrum@2); Kan et al. do not say, and `drop_largest=0` keeps it. Roth's CPU path also loses the smallest: `drop_smallest=1`.
    A singular value below the rounding of the embeddings is zero; a share below 1e-12 counts as 1e-12, so that a collapsed space has a
    large decay instead of an infinite one.

    Args:
        space: the embeddings.
        drop_largest: how many of the largest singular values are left out.
        drop_smallest: how many of the smallest are left out.
        reverse: KL(s || U) instead.
    """
    values = space.spectrum()
    values = values[drop_largest : len(values) - drop_smallest]
    if drop_largest < 0 or drop_smallest < 0 or not len(values):
        raise UnimetricError(
            f"spectral_decay drops {drop_largest} and {drop_smallest} of {min(space.points.shape)} singular values", "leave at least one"
        )
    share = (values / values.sum().clamp_min(1e-300)).clamp_min(1e-12)
    even = torch.full_like(share, 1 / len(share))
    first, second = (share, even) if reverse else (even, share)
    return float((first * (first / second).log()).sum())
