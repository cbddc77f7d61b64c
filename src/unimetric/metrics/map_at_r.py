"""Mean average precision at R."""

from __future__ import annotations

from torch import Tensor

from unimetric.geometry.space import Hits, Space
from unimetric.kinds import metric


@metric(depth=lambda space, count_query: space.most_relevant + count_query)
def map_at_r(space: Space, *, count_query: bool = False) -> float:
    """Average precision in the first R ranks, where R is the number of matches of the query.

        mean over queries of  (1/R) sum over matches of rank r <= R of  precision(r)

    Reference:
        A metric learning reality check (Musgrave et al., ECCV 2020), eqs. 1 and 2.

    Args:
        space: Embeddings.
        count_query: Whether R counts the query itself if it is in the gallery, as in the published
            code of PUMA. This is also the "mAP" of Roth et al. 2020 (their `mAP_c`): a perfect
            space scores (R - 1) / R.
    """

    def value(hits: Hits) -> Tensor:
        ranks = hits.members if count_query else hits.relevant
        return hits.precision(ranks) / ranks.clamp_min(1)

    return space.average(space.most_relevant + count_query, value)
