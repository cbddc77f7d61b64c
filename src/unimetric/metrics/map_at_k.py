"""Mean average precision at k."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from unimetric.arguments import Count
from unimetric.geometry.space import Hits, Space
from unimetric.kinds import metric


def _depth(space: Space, *, k: int | None, class_size: bool, divide: str = "") -> int:
    return space.most_relevant + 1 if class_size else k or space.answers


@metric(depth=_depth)
def map_at_k(
    space: Space,
    *,
    k: Count | None = 1000,
    class_size: bool = False,
    divide: Literal["possible", "relevant", "found", "class"] = "possible",
) -> float:
    """Average precision of the matches among the k nearest neighbors, from 0 to 1.

        mean over queries of  (1/Z) sum over matches of rank r <= k of  precision(r)

    Eq. 29 of Roth et al. 2020 prints R-precision, but their tables hold `mAP_c` of their code: here
    `class_size=True, divide="class"`. Their later `mAP_1000`, which is also the mAP@1000 of ooDML,
    is `k=1000, divide="class"`; `mAP_lim` has k=1023 and `mAP` k=None. Their Z counts the query
    itself, so that a perfect space scores (n_c - 1) / n_c.

    Reference:
        Introduction to information retrieval (Manning et al., 2008), section 8.4; mAP@1000 of
        Milbich et al. 2021.

    Args:
        space: Embeddings.
        k: Number of neighbors. None uses the whole gallery.
        class_size: Whether to use n_c neighbors instead, the size of the query's class including
            the query.
        divide: Z. "possible": matches that fit into k ranks, so that a perfect space scores 1;
            "relevant": matches in the gallery, as in `mean_average_precision` of
            pytorch-metric-learning; "found": matches among the k, as in open-metric-learning;
            "class": n_c, as in the authors' code.
    """
    depth = _depth(space, k=k, class_size=class_size)

    def value(hits: Hits) -> Tensor:
        ranks = hits.members if class_size else depth
        total = {
            "possible": hits.relevant.clamp_max(ranks),
            "relevant": hits.relevant,
            "found": hits.count(ranks),
            "class": hits.members,
        }
        return hits.precision(ranks) / total[divide].clamp_min(1)

    return space.average(depth, value)
