"""No mining: every pair, and to a loss over tuples every tuple."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from unimetric.geometry import Pairs


class All(nn.Module):
    """Every positive and every negative of each anchor; what "no mining" means in Roth et al. 2020, sec. 3.1."""

    gives = Pairs

    def forward(self, similarity: Float[Tensor, "B R"], pairs: Pairs) -> Pairs:
        return pairs
