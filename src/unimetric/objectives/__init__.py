"""One file an objective: `objective(output, labels) -> {"name": term}`, what a run minimises, seen from the model's whole output."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Output:
    """What a model makes of a batch, in float32.

    Args:
        embeddings: (B, D) raw, not normalised.
        tokens: (B, 1 + N, C) the backbone's summary of each picture first, then the positions of its last stage.
        images: (B, 3, H, W) as the backbone saw them.
    """

    embeddings: Float[Tensor, "B D"]
    tokens: Float[Tensor, "B N C"]
    images: Float[Tensor, "B 3 H W"]

    @property
    def features(self) -> Float[Tensor, "B C"]:
        """The summary of each picture."""
        return self.tokens[:, 0]
