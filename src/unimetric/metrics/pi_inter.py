"""Mean distance between classes."""

from __future__ import annotations

from unimetric.geometry.space import Space
from unimetric.kinds import metric


@metric(better="neither")
def pi_inter(space: Space) -> float:
    """Mean cosine distance between the centers of classes.

        1/(C^2 - C) sum over classes k != l of  (1 - cos(mu_k, mu_l))
        mu the mean of a class's unit vectors

    0 if there is only one class.

    Reference:
        Revisiting training strategies and generalization performance in deep metric learning (Roth
        et al., ICML 2020), section 5.

    Args:
        space: Embeddings.
    """
    total, _ = space.sums()
    center = total / total.norm(dim=1, keepdim=True).clamp_min(1e-12)
    count = len(center)
    # A class whose images cancel out has no direction. Its distance to any other class is 1.
    own = center.square().sum()
    return float((count**2 - count - center.sum(0).square().sum() + own) / max(1, count**2 - count))
