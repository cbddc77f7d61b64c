"""Mean average precision at R."""

from __future__ import annotations

from torch import Tensor

from unimetric.geometry.space import Hits, Space


def map_at_r(space: Space, *, count_query: bool = False) -> float:
    """How well the first R places are filled, the early ones counting most, where R is the number of matches that the query has.

    A metric learning reality check (Musgrave et al., ECCV 2020), eqs. 1 and 2.

        mean over queries of  (1/R) sum over matches of rank r <= R of  precision(r)

    Args:
        space: the embeddings.
        count_query: R counts the query itself where it stands in the gallery. So it is in PUMA's published code, and this is also the
            "mAP" of Roth et al. 2020 (their `mAP_c`): a perfect space scores (R - 1) / R.
    """

    def value(hits: Hits) -> Tensor:
        places = hits.members if count_query else hits.relevant
        return hits.precision(places) / places.clamp_min(1)

    return space.average(space.most_relevant + count_query, value)
