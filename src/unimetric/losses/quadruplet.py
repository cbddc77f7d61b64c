"""Quadruplet loss."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.geometry import Dice, Memory, Triplets, draw, euclidean, full, masked_mean, match, mining, unit


class Quadruplet(nn.Module):
    """Beyond triplet loss: a deep quadruplet network (Chen et al., CVPR 2017); eq. 14 of Roth et al. 2020.

        mean of  [d(a, p) - d(a, n) + margin]_+   +   mean of  [d(a, p) - d(n, m) + second_margin]_+

    with d the Euclidean distance of unit vectors, triplets (a, p, n) from the miner, and m drawn evenly among the samples that are of
    neither a's nor n's class.

    Differs from the printed equation: its second term lacks p. The authors' code does not check m's class; here it is checked, and
    where there is no third class the second term is zero. Margins are those of the code; the text says 1 and 0.5.

    Args:
        margin: how much closer than the negative the positive must be.
        second_margin: how much closer than two strangers the positive must be.
        miner: which triplets; default `distance_weighted`.
    """

    family = "tuple"
    default_miner = "distance_weighted"
    reads = (Triplets,)

    def __init__(self, *, margin: float = 0.2, second_margin: float = 0.2, miner: str | nn.Module | None = None) -> None:
        super().__init__()
        self.margin, self.second_margin = margin, second_margin
        self.miner = mining(self, miner)
        self.dice = Dice(2)  # not the numbers of its miner

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        anchors = unit(full(embeddings))
        references, names = (anchors, labels) if memory is None else (unit(full(memory.embeddings)), memory.labels)
        pairs = match(labels, memory, dim=anchors.shape[-1])
        mined = self.miner(anchors.detach() @ references.detach().T, pairs)
        neither = pairs.negative[mined.anchor] & (names[mined.negative][:, None] != names[None, :])  # (T, R)
        stranger, has_stranger = draw(neither, self.dice(len(mined.anchor)))
        a, p = anchors.index_select(0, mined.anchor), references.index_select(0, mined.positive)  # (T, D)
        n, m = references.index_select(0, mined.negative), references.index_select(0, stranger)
        reach = euclidean((a * p).sum(-1))
        first = reach - euclidean((a * n).sum(-1)) + self.margin
        second = reach - euclidean((n * m).sum(-1)) + self.second_margin
        return masked_mean(first.relu(), mined.valid) + masked_mean(second.relu(), mined.valid & has_stranger)
