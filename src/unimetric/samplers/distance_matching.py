"""DDM: the random batch whose distances are distributed most like those of a big batch."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.arguments import Count, Range, Seed
from unimetric.kinds import EmbeddedSampler
from unimetric.samplers._bank import Bank
from unimetric.samplers._candidates import Candidates
from unimetric.samplers._classes import batches
from unimetric.samplers._histograms import pair_histograms


class DistanceMatching(EmbeddedSampler):
    """DDM: the random batch whose distances are distributed most like those of a big batch.

        arg min over m candidates B of  W1(h, h*) = width * sum over bins of |H - H*|

    h and h* are the normalized histograms of all pairwise distances within B and within a big batch
    B* (both with n samples per class), over the range of B*. H and H* are their cumulative sums.
    The embeddings are unit vectors.

    Differs from the authors' code:
        That code computes scipy's Wasserstein distance of the bin heights, as if heights were
        samples, and adds the moments, with mean and standard deviation of every dimension:

            |mu - mu*| + |sigma - sigma*| + 75 (W(h, h*) + W(h*, h))
            W(h, h*) = mean over k of |k-th largest of h - k-th largest of h*|

        `code_cost=True` computes that cost. The code draws classes with replacement. Here the
        classes of a candidate are distinct, as in the paper's SPC-n.

    Reference:
        Revisiting training strategies and generalization performance in deep metric learning (Roth
        et al., ICML 2020), sec. 3.2.

    Args:
        labels: (N,) class of each training row.
        batch_size: Number of rows of a batch, at least 2 and a multiple of n.
        seed: Seed of the draws.
        n: Number of samples per class.
        big_batch: Number of rows of B*. A smaller training set is used completely.
        candidates: Number of candidates m, which the paper does not state. The authors' code uses
            10.
        bins: Number of histogram bins, at most 60.
        code_cost: Whether to use the cost of the authors' code.
    """

    def __init__(
        self,
        *,
        labels: Int[np.ndarray, "N"],
        batch_size: Annotated[int, Range(2)],
        seed: Seed = 0,
        n: Count = 2,
        big_batch: Count = 1024,
        candidates: Count = 10,
        bins: Annotated[int, Range(1, 60)] = 50,
        code_cost: bool = False,
    ) -> None:
        self.candidates = Candidates(labels=labels, batch_size=batch_size, seed=seed, n=n, big_batch=big_batch, candidates=candidates)
        self.bank = Bank(partial(self.candidates.choose, self.cost), rows=len(labels), steps=batches(len(labels), batch_size))
        self.bins, self.code_cost = bins, code_cost

    def cost(self, big_batch: Float[Tensor, "S D"], positions: Int[Tensor, "m B"]) -> Float[Tensor, " m"]:
        """Return the cost of each candidate, given by its positions in the big batch."""
        whole, parts, width = pair_histograms(big_batch, positions, bins=self.bins)
        if not self.code_cost:
            return width * (parts.cumsum(-1) - whole.cumsum(-1)).abs().sum(-1)
        heights = (parts.sort(-1).values - whole.sort(-1).values).abs().mean(-1)
        points = big_batch[positions].double()
        mean = points.mean(1) - big_batch.double().mean(0)
        deviation = points.std(1, correction=0) - big_batch.double().std(0, correction=0)
        return torch.linalg.vector_norm(mean, dim=-1) + torch.linalg.vector_norm(deviation, dim=-1) + 150 * heights
