"""Rho regularization."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unimetric.arguments import Fraction
from unimetric.errors import UnimetricError
from unimetric.geometry import CounterRNG, Pairs, Triplets, draw
from unimetric.kinds import Miner
from unimetric.spec import create


class Rho(Miner):
    """Random replacement of a triplet's negative by a positive (rho regularization).

        with probability p_switch, (a, p, n) becomes (a, a, p'),   p' uniform over the positives

    Samples of one class are pushed apart slightly, so that the embedding keeps more directions. The
    variants are R-Contrastive, R-Margin, R-SNR and R-Triplet. Anchors without a positive are
    skipped.

    Their p_switch on CUB200 is 0.4 (contrastive, triplet, margin with beta 0.6), 0.35 (margin with
    beta 1.2) and 0.3 (SNR). It is 0.35 on CARS196 and 0.15 on SOP. The loss `multi_similarity`
    skips anchors without a positive pair. It therefore skips switched triplets, and the miner has
    no effect on them.

    Differs from the paper:
        The text does not state whether the positive stays. Here the anchor replaces it, so that
        nothing is pulled, as in the authors' miner.

    Reference:
        Revisiting training strategies and generalization performance in deep metric learning (Roth
        et al., ICML 2020), sec. 5.

    Args:
        p_switch: Probability of a switch.
        miner: Spec string of the miner whose triplets are switched. Requires a triplet miner.

    Shape:
        similarity (B, R) -> Triplets, as many as those of `miner`
    """

    gives = Triplets

    def __init__(self, *, p_switch: Fraction = 0.2, miner: str | nn.Module = "distance_weighted") -> None:
        super().__init__()
        self.p_switch = p_switch
        self.miner = create("miners", miner)
        if self.miner.gives is not Triplets:
            raise UnimetricError(
                f"rho: `miner` must give Triplets, but {type(self.miner).__name__} gives {self.miner.gives.__name__}",
                "omit `miner`, or use `rho(miner='distance_weighted')`",
            )
        self.dice = CounterRNG(1)  # other random numbers than those of `miner`

    def forward(self, similarity: Float[Tensor, "B R"], pairs: Pairs) -> Triplets:
        mined = self.miner(similarity, pairs)
        coin, number = self.dice(2 * len(mined.anchor)).to(similarity.device, non_blocking=True).view(2, -1)
        switch = coin < self.p_switch
        sibling, has_sibling = draw(pairs.positive[mined.anchor], number)
        return Triplets(
            mined.anchor,
            torch.where(switch, pairs.own[mined.anchor], mined.positive),
            torch.where(switch, sibling, mined.negative),
            (switch | mined.valid) & has_sibling,
        )
