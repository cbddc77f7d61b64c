"""DDM: of several random batches, the one whose distances are distributed most like those of a big batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.errors import UnimetricError
from unimetric.samplers._bank import Bank, Choice, to_device
from unimetric.samplers._candidates import Candidates
from unimetric.samplers._classes import batches
from unimetric.samplers._histograms import pair_histograms


class DistanceMatching:
    """DDM of Roth et al., Revisiting training strategies and generalization performance in deep metric learning (ICML 2020), sec. 3.2.

        arg min over m candidates B of  W1(h, h*) = width * sum over bins of |H - H*|

    with h and h* the normalised histograms of all pairwise distances within B and within a big batch B* (both of n samples a class),
    over the range of B*, and H, H* their cumulative sums. The embeddings lie on the unit sphere.

    The authors' code takes scipy's Wasserstein distance of the bin heights, as if heights were samples, and adds the moments:

        |mu - mu*| + |sigma - sigma*| + 75 (W(h, h*) + W(h*, h)),    W(h, h*) = mean over k of |k-th largest of h - k-th largest of h*|

    with mean and standard deviation of every dimension; `code_cost=True` does as it does. It draws classes with replacement; here the
    classes of a candidate are different ones, as in the paper's SPC-n.

    Args:
        labels: (N,) the class of each training row.
        batch_size: rows of a batch, at least 2; a multiple of n.
        seed: numbers the sequence of draws.
        n: samples of each class.
        big_batch: rows of B*; all of the data set where it has fewer.
        candidates: m, which the paper does not give and the authors' code sets to 10.
        bins: bins of the histograms, at most 60.
        code_cost: the cost of the authors' code.
    """

    needs_embeddings = True

    def __init__(
        self,
        *,
        labels: Int[np.ndarray, "N"],
        batch_size: int,
        seed: int = 0,
        n: int = 2,
        big_batch: int = 1024,
        candidates: int = 10,
        bins: int = 50,
        code_cost: bool = False,
    ) -> None:
        if not 1 <= bins <= 60:
            raise UnimetricError(f"bins={bins} is not from 1 to 60", "write `bins=50`")
        self.candidates = Candidates(labels=labels, batch_size=batch_size, seed=seed, n=n, big_batch=big_batch, candidates=candidates)
        self.bank = Bank(self._choose, rows=len(labels), steps=batches(len(labels), batch_size, least=2))
        self.epoch, self.bins, self.code_cost = 0, bins, code_cost

    def cost(self, big_batch: Float[Tensor, "S D"], positions: Int[Tensor, "m B"]) -> Float[Tensor, "m"]:
        """How far each candidate, given by its positions in the big batch, is from the big batch."""
        whole, parts, width = pair_histograms(big_batch, positions, bins=self.bins)
        if not self.code_cost:
            return width * (parts.cumsum(-1) - whole.cumsum(-1)).abs().sum(-1)
        heights = (parts.sort(-1).values - whole.sort(-1).values).abs().mean(-1)
        points = big_batch[positions].double()
        mean = points.mean(1) - big_batch.double().mean(0)
        deviation = points.std(1, correction=0) - big_batch.double().std(0, correction=0)
        return torch.linalg.vector_norm(mean, dim=-1) + torch.linalg.vector_norm(deviation, dim=-1) + 150 * heights

    def _choose(self, embeddings: Float[Tensor, "N D"], epoch: int, step: int) -> Choice:
        rows, positions = self.candidates.draw(epoch, step)
        cost = self.cost(embeddings.index_select(0, to_device(rows, embeddings.device)), to_device(positions, embeddings.device))
        return cost.argmin(), lambda best: rows[positions[best]]

    def __len__(self) -> int:
        return self.bank.steps

    def __iter__(self) -> Iterator[Int[np.ndarray, "B"]]:
        return (self.batch(step) for step in range(len(self)))

    def batch(self, step: int) -> Int[np.ndarray, "B"]:
        return self.bank.batch(self.epoch, step)

    def fill(self, embeddings: Float[Tensor, "N D"]) -> None:
        self.bank.fill(embeddings)

    def refresh(self, rows: Int[Tensor, "B"], embeddings: Float[Tensor, "B D"]) -> None:
        self.bank.refresh(rows, embeddings)

    def state_dict(self) -> dict[str, Tensor]:
        return self.bank.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.bank.load_state_dict(state)
