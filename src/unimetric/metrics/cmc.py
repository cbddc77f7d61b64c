"""Cumulative match characteristic."""

from __future__ import annotations

from typing import Literal

from unimetric.arguments import Count
from unimetric.geometry.space import Average, Space
from unimetric.kinds import metric


@metric(depth=lambda space, k, unmatched: k)
def cmc(space: Space, *, k: Count = 1, unmatched: Literal["skip", "miss"] = "skip") -> float:
    """Fraction of queries whose first match has a rank of at most k.

    This is "rank-k" of re-identification.

        mean over queries of  [ rank of the first match <= k ]

    With groups, gallery images of the query's class and camera have no rank (`Space(group=...)`).
    Images of junk labels have none, either. Images of distractor labels have one and match nothing.

    Reference:
        Scalable person re-identification: a benchmark (Zheng et al., ICCV 2015), section 4.

    Args:
        space: Embeddings, with the camera of each image as `group`.
        k: Rank.
        unmatched: What a query without a match counts as: "skip" leaves it out of the mean, as in the
            evaluation of Market-1501; "miss" counts it as not found.
    """
    value = space.average(k, lambda hits: hits.count(k) > 0)
    if unmatched == "skip":
        return value
    each = value.each.new_zeros(space.queries).index_copy_(0, space.matched, value.each)
    return Average(each, space.labels[space.query])
