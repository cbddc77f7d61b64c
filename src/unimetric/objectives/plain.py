"""The loss and nothing else."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor, nn

from unimetric.objectives import Output
from unimetric.spec import create


class Plain(nn.Module):
    """One loss on the embeddings: the protocol of Roth et al. 2020.

        L = loss(embeddings, labels)

    Args:
        loss: a part of `losses/`.
        miner: a part of `miners/`; the loss's own where none is named.
        num_classes: training classes.
        dim: embedding dimension.
    """

    def __init__(self, *, loss: str = "margin", miner: str | None = None, num_classes: int, dim: int) -> None:
        super().__init__()
        self.loss = create("losses", loss, miner=miner, num_classes=num_classes, dim=dim)

    def forward(self, output: Output, labels: Int[Tensor, "B"]) -> dict[str, Tensor]:
        return {"loss": self.loss(output.embeddings, labels)}
