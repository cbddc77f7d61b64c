"""Density of the embedding space."""

from __future__ import annotations

from unimetric.geometry.space import Space
from unimetric.kinds import metric
from unimetric.metrics.pi_inter import pi_inter
from unimetric.metrics.pi_intra import pi_intra


@metric(better="neither")
def pi_ratio(space: Space, *, fill_singletons: bool = False) -> float:
    """Density of the space: mean distance within classes over mean distance between classes.

        pi_intra / max(pi_inter, 1e-8)

    Roth et al. use the training images, Kan et al. the test images.

    Reference:
        Revisiting training strategies and generalization performance in deep metric learning (Roth
        et al., ICML 2020), section 5; eq. 6 of Kan et al. 2022 ("embedding space density").

    Args:
        space: Embeddings.
        fill_singletons: Whether a class of one image counts as the widest class.
    """
    return pi_intra(space, fill_singletons=fill_singletons) / max(pi_inter(space), 1e-8)
