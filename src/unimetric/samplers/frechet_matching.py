"""FRD: of several random batches, the one whose Gaussian is closest to that of a big batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.geometry.frechet import frechet_of_points, gaussian
from unimetric.samplers._bank import Bank, Choice, to_device
from unimetric.samplers._candidates import Candidates
from unimetric.samplers._classes import batches


class FrechetMatching:
    """FRD of Roth et al., Revisiting training strategies and generalization performance in deep metric learning (ICML 2020), sec. 3.2.

        arg min over m candidates B of  |mu - mu*|^2 + tr(S + S* - 2 (S S*)^(1/2))

    with the means and covariances of the embeddings of B and of a big batch B*, both of n samples a class (Heusel et al. 2017). The
    embeddings lie on the unit sphere.

    The authors' code adds 1e-8 to the diagonal under the root and drops an imaginary part; here neither is needed (see
    `unimetric.geometry.frechet`). It draws classes with replacement; here the classes of a candidate are different ones, as in the paper's
    SPC-n.

    Args:
        labels: (N,) the class of each training row.
        batch_size: rows of a batch, at least 2; a multiple of n.
        seed: numbers the sequence of draws.
        n: samples of each class.
        big_batch: rows of B*; all of the data set where it has fewer.
        candidates: m, which the paper does not give and the authors' code sets to 10.
    """

    needs_embeddings = True

    def __init__(
        self, *, labels: Int[np.ndarray, "N"], batch_size: int, seed: int = 0, n: int = 2, big_batch: int = 1024, candidates: int = 10
    ) -> None:
        self.candidates = Candidates(labels=labels, batch_size=batch_size, seed=seed, n=n, big_batch=big_batch, candidates=candidates)
        self.bank = Bank(self._choose, rows=len(labels), steps=batches(len(labels), batch_size, least=2))
        self.epoch = 0

    def cost(self, big_batch: Float[Tensor, "S D"], positions: Int[Tensor, "m B"]) -> Float[Tensor, "m"]:
        """The Frechet distance of each candidate, given by its positions in the big batch."""
        big_batch = big_batch.double()
        return frechet_of_points(big_batch[positions], *gaussian(big_batch))

    def _choose(self, embeddings: Float[Tensor, "N D"], epoch: int, step: int) -> Choice:
        rows, positions = self.candidates.draw(epoch, step)
        cost = self.cost(embeddings[to_device(rows, embeddings.device)], to_device(positions, embeddings.device))
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
