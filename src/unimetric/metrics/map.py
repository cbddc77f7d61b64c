"""Mean average precision over the whole ranking."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from unimetric.geometry.space import Hits, Space
from unimetric.kinds import metric


@metric(depth=lambda space, variant: space.answers)
def map(space: Space, *, variant: Literal["rectangle", "oxford"] = "rectangle") -> float:
    """Average precision over the whole ranking: "mAP" of re-identification.

        mean over queries of  (1/R) sum over matches of  precision(r)                           rectangle
        mean over queries of  (1/R) sum over matches of  (precision(r - 1) + precision(r)) / 2  oxford

    r is the rank of a match, R their number, and precision(0) is 1. With groups, gallery images of the
    query's class and camera have no rank, and images of junk labels have none (`Space`).

    Reference:
        Scalable person re-identification: a benchmark (Zheng et al., ICCV 2015), section 4; Object
        retrieval with large vocabularies and fast spatial matching (Philbin et al., CVPR 2007).

    Args:
        space: Embeddings, with the camera of each image as `group`.
        variant: Area under the curve of precision and recall: "rectangle", as in torchreid and
            fast-reid, or "oxford", by trapezoids, as in the code of Oxford 5k and Market-1501.
    """

    def value(hits: Hits) -> Tensor:
        if variant == "rectangle":
            return hits.precision(space.answers) / hits.relevant.clamp_min(1)
        before = ((hits.nth - 1).to(torch.float64) / (hits.rank - 1)).where(hits.rank > 1, 1.0)
        both = before + hits.nth.to(torch.float64) / hits.rank
        return hits.total(both / 2, space.answers) / hits.relevant.clamp_min(1)

    return space.average(space.answers, value)
