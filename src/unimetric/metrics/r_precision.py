"""R-precision."""

from __future__ import annotations

from torch import Tensor

from unimetric.geometry.space import Hits, Space


def r_precision(space: Space, *, count_query: bool = False) -> float:
    """Which share of the first R places holds a match, where R is the number of matches that the query has in the gallery.

    Introduction to information retrieval (Manning et al., 2008), section 8.4; A metric learning reality check (Musgrave et al., ECCV 2020).

        mean over queries of  (matches of rank <= R) / R

    Eq. 29 of Roth et al. 2020, which is headed "mAP", prints this quantity; their tables hold an average precision (see `map_at_k`).

    Args:
        space: the embeddings.
        count_query: R counts the query itself where it stands in the gallery: one place too many, as in PUMA's published code.
    """

    def value(hits: Hits) -> Tensor:
        places = hits.members if count_query else hits.relevant
        return hits.count(places) / places.clamp_min(1)

    return space.average(space.most_relevant + count_query, value)
