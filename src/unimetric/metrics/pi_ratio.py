"""Density of the embedding space."""

from __future__ import annotations

from unimetric.geometry.space import Space
from unimetric.metrics._describes import describes
from unimetric.metrics.pi_inter import pi_inter
from unimetric.metrics.pi_intra import pi_intra


@describes
def pi_ratio(space: Space, *, fill_singletons: bool = False) -> float:
    """How densely the space is filled: the mean distance within classes over the mean distance between them.

    Revisiting training strategies and generalization performance in deep metric learning (Roth et al., ICML 2020), section 5; eq. 6 of
    Kan et al. 2022 ("embedding space density").

        pi_intra / max(pi_inter, 1e-8)

    Roth et al. take the training pictures, Kan et al. the test pictures.

    Args:
        space: the embeddings.
        fill_singletons: let a class of one picture count as the widest class.
    """
    return pi_intra(space, fill_singletons=fill_singletons) / max(pi_inter(space), 1e-8)
