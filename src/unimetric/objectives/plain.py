"""Objective with one loss and nothing else."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from unimetric.arguments import Count
from unimetric.kinds import Objective, Output
from unimetric.spec import create


class Plain(Objective):
    """One loss on the embeddings, as in the protocol of Roth et al. 2020.

        L = loss(embeddings, labels)

    Args:
        loss: Loss spec string.
        miner: Miner spec string. Defaults to the loss's miner.
        num_classes: Number of training classes. Provided by the run.
        dim: Embedding dimension. Provided by the run.
    """

    def __init__(self, *, loss: str = "margin", miner: str | None = None, num_classes: Count, dim: Count) -> None:
        super().__init__()
        self.loss = create("losses", loss, miner=miner, num_classes=num_classes, dim=dim)

    def forward(self, output: Output, labels: Int[Tensor, "B"]) -> dict[str, Tensor]:
        return {"loss": self.loss(output.embeddings, labels)}
