"""Mean distance within a class."""

from __future__ import annotations

from unimetric.geometry.space import Space
from unimetric.kinds import metric


@metric(better="neither")
def pi_intra(space: Space, *, fill_singletons: bool = False) -> float:
    """Mean cosine distance between images of the same class, averaged over classes.

        mean over classes of  1/(n^2 - n) sum over i != j of  (1 - cos(f_i, f_j))

    The identity sum over i, j of f_i f_j = |sum of f|^2, in float64, avoids computing pairs. The
    paper does not name the distance; the authors' code uses the cosine. A class of one image has no
    pairs and is skipped. 0 if no class has any.

    Reference:
        Revisiting training strategies and generalization performance in deep metric learning (Roth
        et al., ICML 2020), section 5.

    Args:
        space: Embeddings.
        fill_singletons: Whether a class of one image counts as the widest class, as intended in the
            authors' code.
    """
    total, count = space.sums()
    size = count.to(total.dtype)
    distance = (size.square() - total.square().sum(1)).clamp_min(0) / (size.square() - size).clamp_min(1)
    if not (count > 1).any():
        return 0.0
    if fill_singletons:
        return float(distance.where(count > 1, distance.max()).mean())
    return float(distance[count > 1].mean())
