"""Mean reciprocal rank."""

from __future__ import annotations

from unimetric.arguments import Count
from unimetric.geometry.space import Space
from unimetric.kinds import metric


@metric(depth=lambda space, k: k or space.answers)
def mrr(space: Space, *, k: Count | None = 1000) -> float:
    """Mean reciprocal rank of the first match.

        mean over queries of  1 / (rank of the first match)

    Reference:
        The TREC-8 question answering track report (Voorhees, 1999).

    Args:
        space: Embeddings.
        k: Rank beyond which a first match counts as zero, which changes the mean by less than 1/k.
            None uses the whole gallery.
    """
    depth = k or space.answers
    return space.average(depth, lambda hits: hits.first(depth))
