"""FRD: the random batch whose Gaussian is closest to that of a big batch."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.arguments import Count, Range, Seed
from unimetric.geometry.frechet import frechet_of_points, gaussian
from unimetric.kinds import EmbeddedSampler
from unimetric.samplers._bank import Bank
from unimetric.samplers._candidates import Candidates
from unimetric.samplers._classes import batches


class FrechetMatching(EmbeddedSampler):
    """FRD: the random batch whose Gaussian is closest to that of a big batch.

        arg min over m candidates B of  |mu - mu*|^2 + tr(S + S* - 2 (S S*)^(1/2))

    The means and covariances are those of the embeddings of B and of a big batch B*, both with n
    samples per class (Heusel et al. 2017). The embeddings are unit vectors.

    Differs from the authors' code:
        That code adds 1e-8 to the diagonal under the root and drops an imaginary part. Here neither
        is needed (see `unimetric.geometry.frechet`). It draws classes with replacement. Here the
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
    ) -> None:
        self.candidates = Candidates(labels=labels, batch_size=batch_size, seed=seed, n=n, big_batch=big_batch, candidates=candidates)
        self.bank = Bank(partial(self.candidates.choose, self.cost), rows=len(labels), steps=batches(len(labels), batch_size))

    def cost(self, big_batch: Float[Tensor, "S D"], positions: Int[Tensor, "m B"]) -> Float[Tensor, " m"]:
        """Return the Frechet distance of each candidate, given by its positions in the big batch."""
        big_batch = big_batch.double()
        return frechet_of_points(big_batch[positions], *gaussian(big_batch))
