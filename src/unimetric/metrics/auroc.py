"""Area under the ROC curve of known against unknown queries."""

from __future__ import annotations

import torch

from unimetric.geometry.space import Space
from unimetric.kinds import metric
from unimetric.metrics._open_set import find_known, find_unknown


@metric(needs=lambda space: (find_known(space), find_unknown(space)))
def auroc(space: Space) -> float:
    """Probability that a known-class query has a nearer neighbor than an unknown-class one.

        mean over both kinds of queries of  [ score > score' ] + [ score = score' ] / 2

    The score is that of the nearest gallery image, right or wrong. 0.5 is chance. Queries that lose
    every match to the group rule are of neither kind.

    Reference:
        A baseline for detecting misclassified and out-of-distribution examples (Hendrycks and
        Gimpel, ICLR 2017).

    Args:
        space: Embeddings, with queries whose class is not in the gallery.
    """
    known_queries, unknown_queries = find_known(space), find_unknown(space)
    scores = space.nearest()[1]
    known, unknown = scores[known_queries], scores[unknown_queries].sort().values
    below, up_to = (torch.searchsorted(unknown, known.contiguous(), right=right).double() for right in (False, True))
    return float(((below + up_to) / 2).mean() / len(unknown))
