"""Recall at k."""

from __future__ import annotations

from unimetric.arguments import Count
from unimetric.geometry.space import Space
from unimetric.kinds import metric


@metric(depth=lambda space, k: k)
def recall(space: Space, *, k: Count = 1) -> float:
    """Fraction of queries with a match among the k nearest neighbors.

        mean over queries of  [ some neighbor of rank <= k matches ]

    The query itself is excluded by its index. The papers' code drops the first neighbor instead,
    which may be a duplicate image.

    Reference:
        Product quantization for nearest neighbor search (Jegou et al., TPAMI 2011), as reported in
        deep metric learning since Song et al., CVPR 2016.

    Args:
        space: Embeddings.
        k: Number of neighbors. If it exceeds the gallery, the whole gallery is used.
    """
    return space.average(k, lambda hits: hits.count(k) > 0)
