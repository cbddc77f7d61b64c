"""R-precision."""

from __future__ import annotations

from torch import Tensor

from unimetric.geometry.space import Hits, Space
from unimetric.kinds import metric


@metric(depth=lambda space, count_query: space.most_relevant + count_query)
def r_precision(space: Space, *, count_query: bool = False) -> float:
    """Fraction of matches in the first R ranks, where R is the number of matches of the query.

        mean over queries of  (matches of rank <= R) / R

    Eq. 29 of Roth et al. 2020, titled "mAP", prints this quantity; their tables hold an average
    precision (see `map_at_k`).

    Reference:
        Introduction to information retrieval (Manning et al., 2008), section 8.4; A metric learning
        reality check (Musgrave et al., ECCV 2020).

    Args:
        space: Embeddings.
        count_query: Whether R counts the query itself if it is in the gallery: one rank too many,
            as in the published code of PUMA.
    """

    def value(hits: Hits) -> Tensor:
        ranks = hits.members if count_query else hits.relevant
        return hits.count(ranks) / ranks.clamp_min(1)

    return space.average(space.most_relevant + count_query, value)
