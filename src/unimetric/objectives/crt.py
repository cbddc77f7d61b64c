"""Objective of the coded residual transform."""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.arguments import Count, NonNegative
from unimetric.errors import UnimetricError
from unimetric.geometry import cosines
from unimetric.kinds import Objective, Output
from unimetric.spec import create


class CRT(Objective):
    """Objective of the coded residual transform, for a head with two branches.

        L = diversity L_div + low loss(f1) + high loss(f2) + consistency |S1 - S2|_1
        L_div = 1/(K (K - 1)) sum_{k != j} |cos(c_k, c_j)|

    f1 and f2 are the branches, S1 and S2 their (B, B) matrices of cosine similarities, and c_k the
    prototypes of the head. With several sets of prototypes, their L_div are added. The paper's loss is
    multi-similarity, divided by the batch size. Any other loss is possible; it is built once per branch.

    Differs from the paper:
        Eq. 5 sums over all B x B entries. At the printed weights, the gradient of that sum exceeds the
        gradient of the loss by a factor of about B. `reduction="mean"` gives both the same order of
        magnitude, `row` divides the sum by B, and `sum` is the printed equation.

    Reference:
        Coded residual transform for generalizable deep metric learning (Kan et al., NeurIPS 2022).

    Args:
        loss: Spec string of the loss of each branch.
        miner: Spec string of the miner. Defaults to the loss's default miner.
        low: Weight of the loss on the first branch, the embedding.
        high: Weight of the loss on the second branch: 0.1 for CUB and Cars196, 0.9 for Stanford Online
            Products and In-Shop. With 0 the term is skipped.
        consistency: Weight of the difference between the similarities. With 0 the term is skipped.
        diversity: Weight of the similarity between prototypes. With 0 the term is skipped, and the head needs no prototypes.
        reduction: Reduction of the difference: `mean`, `row` or `sum`.
        start: Initial prototypes: `head` for those of the head, `kmeans` for the k-means centers of the
            positions of the first batch, which replace them after the first step. The paper does not
            state an initialization.
        detach_high: Whether only the first branch receives the gradient of the difference. Not in the paper.
        num_classes: Number of training classes.
        branches: Dimensions of the head's branches. Provided by the run.

    Shape:
        embeddings (B, D), labels (B,) -> one scalar per term
    """

    started: Tensor
    seen: Tensor

    def __init__(
        self,
        *,
        loss: str = "multi_similarity(kept_only=False)",
        miner: str | None = None,
        low: NonNegative = 1.0,
        high: NonNegative = 0.1,
        consistency: NonNegative = 0.9,
        diversity: NonNegative = 1.0,
        reduction: Literal["mean", "row", "sum"] = "mean",
        detach_high: bool = False,
        start: Literal["head", "kmeans"] = "head",
        num_classes: Count,
        branches: tuple[Count, ...],
    ) -> None:
        super().__init__()
        if len(branches) != 2:
            raise UnimetricError(
                f"the objective `crt` requires a head with two branches, got {len(branches)}",
                'use `head = "crt"`, or `objective = "plain"`',
            )
        self.low_loss, self.high_loss = (create("losses", loss, miner=miner, num_classes=num_classes, dim=dim) for dim in branches)
        self.low, self.high, self.consistency, self.diversity = low, high, consistency, diversity
        self.reduction, self.detach_high = reduction, detach_high
        self.waiting = start == "kmeans"
        if self.waiting:
            self.reads = ("tokens",)
            self.register_buffer("started", torch.zeros((), dtype=torch.bool))  # so that a resumed run does not start again
        self.heads: list[Any] = []  # a list, so that the head is not registered as a submodule

    def meet(self, model: Any) -> None:
        """Store the head, whose prototypes the diversity term reads."""
        if (self.diversity or self.waiting) and not model.head.prototype_sets:
            raise UnimetricError(
                f"the objective `crt` requires a head with prototypes, but the head {type(model.head).__name__} has none",
                'use `head = "crt"`, or `objective = "crt(diversity=0)"`',
            )
        self.heads = [model.head]

    def begin(self) -> None:
        if self.waiting and bool(self.started):  # synchronizes with the GPU, but only before the first step of a process
            self.waiting, self.reads = False, ()

    def stepped(self) -> None:
        if self.waiting:
            self.heads[0].start_prototypes(self.seen)
            self.started.fill_(True)
            del self.seen

    def forward(self, output: Output, labels: Int[Tensor, "B"]) -> dict[str, Tensor]:
        first, second = output.branches
        if self.waiting:
            self.seen = output.tokens.detach()
        terms: dict[str, Tensor] = {"loss": self.low * self.low_loss(first, labels)}
        if self.high:
            terms["high"] = self.high * self.high_loss(second, labels)
        if self.consistency:
            other = cosines(second.detach() if self.detach_high else second)
            terms["consistency"] = self.consistency * _REDUCTIONS[self.reduction]((cosines(first) - other).abs())
        if self.diversity and self.heads:
            terms["diversity"] = self.diversity * torch.stack([likeness(each) for each in self.heads[0].prototype_sets]).sum()
        return terms


_REDUCTIONS = {"mean": lambda x: x.mean(), "row": lambda x: x.sum() / len(x), "sum": lambda x: x.sum()}


def likeness(prototypes: Float[Tensor, "K L"]) -> Float[Tensor, ""]:
    """Return the mean absolute cosine similarity between different prototypes.

    Zero for one prototype.
    """
    count = len(prototypes)
    # The matrix is symmetric, so one triangle without the diagonal has every pair.
    return cosines(prototypes).abs().triu(1).sum() * (2 / max(1, count * (count - 1)))
