"""No mining."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from unimetric.geometry import Pairs
from unimetric.kinds import Miner


class All(Miner):
    """Selection of every positive and every negative of each anchor, without mining.

    A loss over tuples then uses every tuple.

    Reference:
        Revisiting training strategies and generalization performance in deep metric learning (Roth
        et al., ICML 2020), sec. 3.1.

    Shape:
        similarity (B, R) -> Pairs
    """

    gives = Pairs

    def forward(self, similarity: Float[Tensor, "B R"], pairs: Pairs) -> Pairs:
        return pairs
