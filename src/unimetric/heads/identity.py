"""No head: the features of the backbone."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from unimetric.arguments import Count
from unimetric.kinds import Head


class Identity(Head):
    """The backbone's global token, unchanged.

    This is the "ImageNet features" row of the reference. It evaluates any pretrained network without fine-tuning.

    Reference:
        Revisiting training strategies and generalization performance in deep metric learning (Roth et al., ICML 2020).

    Args:
        features: Number of backbone channels. Provided by the run.

    Shape:
        tokens (B, 1 + N, C) -> (B, C)
    """

    def __init__(self, *, features: Count) -> None:
        super().__init__(features)

    def forward(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B D"]:
        return tokens[:, 0]
