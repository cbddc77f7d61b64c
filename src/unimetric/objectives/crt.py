"""What the coded residual transform minimises."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.errors import UnimetricError
from unimetric.geometry import cosines
from unimetric.objectives import Output
from unimetric.spec import create


class CRT(nn.Module):
    """Coded residual transform for generalizable deep metric learning (Kan et al., NeurIPS 2022), for a head of two branches.

        L = diversity L_div + low loss(f1) + high loss(f2) + consistency |S1 - S2|_1
        L_div = 1/(K (K - 1)) sum_{k != j} |cos(c_k, c_j)|

    with f1 and f2 the branches, S1 and S2 their (B, B) matrices of cosine similarities, and c_k the prototypes of the head; where it has
    several sets, their L_div add up. The paper's loss is multi-similarity, divided by the batch; any other may stand in its place, built
    once for each branch.

    Differs from the printed equation: eq. 5 sums over all B x B entries, whose gradient outweighs that of the loss by the batch size at
    the printed weights. `reduction="mean"` keeps the two of one order; `row` divides the sum by B, and `sum` is the literal one.

    Args:
        loss: a part of `losses/`, for each branch.
        miner: a part of `miners/`; the loss's own where none is named.
        low: weight of the loss on the first branch, which retrieval uses.
        high: weight of the loss on the second branch: 0.1 for CUB and Cars196, 0.9 for Stanford Online Products and In-Shop.
        consistency: weight of the difference of the similarities; 0 leaves it out.
        diversity: weight of the prototypes' likeness; 0 leaves it out, and lets heads without prototypes in.
        reduction: of the difference: `mean`, `row` or `sum`.
        detach_high: only the first branch learns from the difference; not in the paper.
        num_classes: training classes.
        branches: dimensions of the head's branches; a run gives it.
    """

    def __init__(
        self,
        *,
        loss: str = "multi_similarity(kept_only=False)",
        miner: str | None = None,
        low: float = 1.0,
        high: float = 0.1,
        consistency: float = 0.9,
        diversity: float = 1.0,
        reduction: str = "mean",
        detach_high: bool = False,
        num_classes: int,
        branches: tuple[int, ...],
    ) -> None:
        super().__init__()
        if len(branches) != 2:
            raise UnimetricError(
                f"the objective `crt` compares two branches, but the head has {len(branches)}",
                'write `head = "crt"`, or `objective = "plain"`',
            )
        if reduction not in _REDUCTIONS:
            raise UnimetricError(f"`reduction` of the objective `crt` cannot be {reduction!r}", "choose from: " + ", ".join(_REDUCTIONS))
        self.low_loss, self.high_loss = (create("losses", loss, miner=miner, num_classes=num_classes, dim=dim) for dim in branches)
        self.low, self.high, self.consistency, self.diversity = low, high, consistency, diversity
        self.reduction, self.detach_high = reduction, detach_high
        self.heads: list[Any] = []  # in a list, so that the head's weights do not become the objective's

    def meet(self, model: Any) -> None:
        """Remember the head whose prototypes are to differ."""
        if self.diversity and not getattr(model.head, "prototype_sets", ()):
            raise UnimetricError(
                f"the objective `crt` keeps prototypes apart, but the head {type(model.head).__name__} has none",
                'write `head = "crt"`, or `objective = "crt(diversity=0)"`',
            )
        self.heads = [model.head]

    def forward(self, output: Output, labels: Int[Tensor, "B"]) -> dict[str, Tensor]:
        first, second = output.branches
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
    """Mean absolute cosine of two different prototypes; zero where there is one alone."""
    count = len(prototypes)
    # One triangle: the diagonal is no pair, and the other triangle is the same.
    return cosines(prototypes).abs().triu(1).sum() * (2 / max(1, count * (count - 1)))
