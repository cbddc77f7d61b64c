"""Mean reciprocal rank."""

from __future__ import annotations

from unimetric.geometry.space import Space


def mrr(space: Space, *, k: int | None = 1000) -> float:
    """How far down the first match stands: one over its rank, on average.

    The TREC-8 question answering track report (Voorhees, 1999).

        mean over queries of  1 / (rank of the first match)

    Args:
        space: the embeddings.
        k: a first match beyond this rank counts as zero, which changes the mean by less than 1/k; None looks at the whole gallery.
    """
    depth = space.answers if k is None else k
    return space.average(depth, lambda hits: hits.first(depth))
