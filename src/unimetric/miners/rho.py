"""Rho-regularisation: now and then a positive in the place of the negative."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unimetric.errors import UnimetricError
from unimetric.geometry import Dice, Pairs, Triplets, draw
from unimetric.spec import create


class Rho(nn.Module):
    """Rho-regularisation (Roth et al., ICML 2020, sec. 5): R-Contrastive, R-Margin, R-SNR, R-Triplet.

        with probability p_switch the triplet (a, p, n) becomes (a, a, p'),  p' evenly among the positives

    so that samples of one class are pushed apart a little, and the embedding keeps more directions. Anchors alone in their class are
    skipped.

    The paper's text leaves open whether the positive stays; here the anchor takes its place and so there is no pull, as in the authors'
    miner. Their p_switch: for CUB200 0.4 (contrastive, triplet, margin of beta 0.6), 0.35 (margin of beta 1.2), 0.3 (SNR); 0.35 for
    CARS196; 0.15 for SOP. The loss `multi_similarity` skips an anchor without a positive pair, so that with it a switched one is left out
    and nothing is pushed apart.

    Args:
        p_switch: how often.
        miner: whose triplets; any that gives triplets, written as a name or a call.
    """

    gives = Triplets

    def __init__(self, *, p_switch: float = 0.2, miner: str | nn.Module = "distance_weighted") -> None:
        super().__init__()
        self.p_switch = p_switch
        self.miner = create("miners", miner)
        if self.miner.gives is not Triplets:
            raise UnimetricError(
                f"rho switches the negatives of triplets, but the miner {type(self.miner).__name__} gives {self.miner.gives.__name__}",
                "leave `miner` out, or write `rho(miner='distance_weighted')` or another that gives triplets",
            )
        self.dice = Dice(1)  # not the numbers of its miner

    def forward(self, similarity: Float[Tensor, "B R"], pairs: Pairs) -> Triplets:
        mined = self.miner(similarity, pairs)
        coin, number = self.dice(2 * len(mined.anchor)).view(2, -1)
        switch = coin < self.p_switch
        sibling, has_sibling = draw(pairs.positive[mined.anchor], number)
        return Triplets(
            mined.anchor,
            torch.where(switch, pairs.own[mined.anchor], mined.positive),
            torch.where(switch, sibling, mined.negative),
            (switch | mined.valid) & has_sibling,
        )
