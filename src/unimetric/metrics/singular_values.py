"""Singular values of all embeddings."""

from __future__ import annotations

from unimetric.arguments import Count
from unimetric.geometry.space import Space
from unimetric.kinds import metric


@metric(better="neither")
def singular_values(space: Space, *, top: Count = 128) -> dict[str, float]:
    """Fractions of the largest singular values of the embeddings.

        s / sum(s)
        s the singular values of the (N, D) embeddings, sorted

    Reference:
        Revisiting training strategies and generalization performance in deep metric learning (Roth
        et al., ICML 2020), figure 8, where the embeddings are those of the training images.

    Args:
        space: Embeddings.
        top: Number of singular values to return. The largest has the key "1".
    """
    values = space.spectrum()
    fractions = (values / values.sum().clamp_min(1e-300)).tolist()
    return {str(number): value for number, value in enumerate(fractions[:top], 1)}
