"""Mean distance within a class."""

from __future__ import annotations

from unimetric.geometry.space import Space
from unimetric.metrics._describes import describes


@describes
def pi_intra(space: Space, *, fill_singletons: bool = False) -> float:
    """How far apart the pictures of one class lie, on average: the mean cosine distance of its pairs.

    Revisiting training strategies and generalization performance in deep metric learning (Roth et al., ICML 2020), section 5.

        mean over classes of  1/(n^2 - n) sum over i != j of  (1 - cos(f_i, f_j))

    By the identity sum over i, j of f_i f_j = |sum of f|^2, in float64: no pair is ever made. The paper does not name the distance; the
    authors' code takes the cosine. A class of one picture has no pairs and is left out; 0 if no class has any.

    Args:
        space: the embeddings.
        fill_singletons: let a class of one picture count as the widest class, as the authors' code means to do.
    """
    total, count = space.sums()
    size = count.to(total.dtype)
    distance = (size.square() - total.square().sum(1)).clamp_min(0) / (size.square() - size).clamp_min(1)
    if not (count > 1).any():
        return 0.0
    return float(distance.where(count > 1, distance.max()).mean() if fill_singletons else distance[count > 1].mean())
