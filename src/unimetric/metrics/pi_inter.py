"""Mean distance between classes."""

from __future__ import annotations

from unimetric.geometry.space import Space
from unimetric.metrics._describes import describes


@describes
def pi_inter(space: Space) -> float:
    """How far apart the classes lie, on average: the mean cosine distance of their centres.

    Revisiting training strategies and generalization performance in deep metric learning (Roth et al., ICML 2020), section 5.

        1/(C^2 - C) sum over classes k != l of  (1 - cos(mu_k, mu_l)),   mu the mean of a class's unit vectors

    0 if there is one class only.

    Args:
        space: the embeddings.
    """
    total, _ = space.sums()
    centre = total / total.norm(dim=1, keepdim=True).clamp_min(1e-12)
    count = len(centre)
    # A class whose pictures cancel out has no direction: its distance to any other is 1, and to itself it is not a pair.
    own = centre.square().sum()
    return float((count**2 - count - centre.sum(0).square().sum() + own) / max(1, count**2 - count))
