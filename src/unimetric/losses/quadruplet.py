"""Quadruplet loss."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.arguments import Real
from unimetric.geometry import CounterRNG, Memory, Triplets, draw, euclidean, masked_mean, match, unit, upcast_half
from unimetric.kinds import Loss
from unimetric.losses._mining import resolve_miner


class Quadruplet(Loss):
    """Triplet loss plus a second hinge against the distance of two other classes.

        mean of  [d(a, p) - d(a, n) + margin]_+   +   mean of  [d(a, p) - d(n, m) + second_margin]_+

    d is the Euclidean distance between normalized embeddings. The miner selects the triplets (a, p,
    n). m is drawn uniformly from the samples whose class is neither that of a nor that of n.

    Differs from the paper:
        The second term of eq. 14 of Roth et al. 2020 lacks p. Their code broadcasts (B, 1, D)
        against (B, D), so that its second term compares every n_i with every m_j. Here n_i is
        compared with m_i only, as in the paper. Their code does not check the class of m; here it
        is checked, and without a third class the second term is zero. The margins are those of the
        code; the text states 1 and 0.5.

    Reference:
        Beyond triplet loss: a deep quadruplet network (Chen et al., CVPR 2017); eq. 14 of Roth
        et al. 2020.

    Args:
        margin: Margin between the positive and the negative distance.
        second_margin: Margin between the positive distance and the distance of n and m.
        miner: Miner spec string. Requires a triplet miner. Defaults to `distance_weighted`.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "tuple"
    default_miner = "distance_weighted"
    reads = (Triplets,)

    def __init__(self, *, margin: Real = 0.2, second_margin: Real = 0.2, miner: str | nn.Module | None = None) -> None:
        super().__init__()
        self.margin, self.second_margin = margin, second_margin
        self.miner = resolve_miner(self, miner)
        self.dice = CounterRNG(2)  # other random numbers than those of the miner

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        anchors = unit(upcast_half(embeddings))
        references, names = (anchors, labels) if memory is None else (unit(upcast_half(memory.embeddings)), memory.labels)
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
