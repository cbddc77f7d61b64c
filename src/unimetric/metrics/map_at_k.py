"""Mean average precision at k."""

from __future__ import annotations

from torch import Tensor

from unimetric.errors import UnimetricError, closest
from unimetric.geometry.space import Hits, Space

DIVISORS = ("possible", "relevant", "found", "class")


def map_at_k(space: Space, *, k: int | None = 1000, class_size: bool = False, divide: str = "possible") -> float:
    """How early the matches come among the k nearest neighbours: the precision at each match, averaged over all that could be there.

    Introduction to information retrieval (Manning et al., 2008), section 8.4; mAP@1000 of Milbich et al. 2021.

        mean over queries of  (1/Z) sum over matches of rank r <= k of  precision(r)

    Eq. 29 of Roth et al. 2020 prints R-precision, but their tables hold their code's `mAP_c`: here `class_size=True, divide="class"`.
    Their later `mAP_1000`, which is also ooDML's mAP@1000, is `k=1000, divide="class"`; `mAP_lim` has k=1023 and `mAP` k=None.
    Their Z counts the query itself, so that a perfect space scores (n_c - 1) / n_c.

    Args:
        space: the embeddings.
        k: how many neighbours are looked at; None looks at the whole gallery.
        class_size: look at n_c neighbours instead, the size of the query's class with the query itself.
        divide: Z. "possible": matches that k places can hold, so that a perfect space scores 1; "relevant": matches in the gallery, as
            pytorch-metric-learning's `mean_average_precision`; "found": matches among the k, as open-metric-learning's; "class": n_c, as
            the authors' code.
    """
    if divide not in DIVISORS:
        raise UnimetricError(f"map_at_k cannot divide by `{divide}`", closest(divide, DIVISORS))
    depth = space.most_relevant + 1 if class_size else space.answers if k is None else k

    def value(hits: Hits) -> Tensor:
        places = hits.members if class_size else depth
        total = {
            "possible": hits.relevant.clamp_max(places),
            "relevant": hits.relevant,
            "found": hits.count(places),
            "class": hits.members,
        }
        return hits.precision(places) / total[divide].clamp_min(1)

    return space.average(depth, value)
