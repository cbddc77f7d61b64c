"""Smooth average precision."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unimetric.arguments import Positive
from unimetric.errors import UnimetricError
from unimetric.geometry import BLOCK, CACHED, Memory, compare, upcast_half
from unimetric.kinds import Loss


class SmoothAP(Loss):
    """One minus average precision, with a sigmoid instead of the step that counts ranks.

        1 - mean over anchors of  1/|P| sum_p R(p) / (R(p) + sum_n G(s_an - s_ap))

        R(p) = 1 + sum_{q != p} G(s_aq - s_ap),   G(x) = 1 / (1 + exp(-x / temperature))

    s is the cosine similarity, p and q are among the positives P, and n among the negatives.
    Anchors without a positive are skipped.

    Differs from the paper:
        An anchor does not retrieve itself, as in the paper's text. In the authors' code and in
        pytorch-metric-learning it does. Classes may differ in size.

    Reference:
        Smooth-AP: smoothing the path towards large-scale image retrieval (Brown et al., ECCV 2020).

    Args:
        temperature: Width of the sigmoid.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "tuple"

    def __init__(self, *, temperature: Positive = 0.01) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        similarity, pairs = compare(upcast_half(embeddings), labels, memory)
        lost, _ = _lost(similarity, pairs.positive, pairs.negative, self.temperature)
        return lost


# A custom operator, which the compiler does not trace. Otherwise it would unroll the loop over every column.
@torch.library.custom_op(
    "unimetric::smooth_ap",
    mutates_args=(),
    schema="(Tensor similarity, Tensor positive, Tensor negative, float temperature) -> (Tensor lost, Tensor slope)",
)
def _lost(
    similarity: Float[Tensor, "B R"], positive: Bool[Tensor, "B R"], negative: Bool[Tensor, "B R"], temperature: float
) -> tuple[Float[Tensor, ""], Float[Tensor, "B R"]]:
    """Return 1 - AP and its gradient in one pass over (B, step, R) blocks.

    The backward pass does not need the blocks.
    """
    # Exclude columns that are neither positive nor negative.
    logits = torch.where(positive | negative, similarity / temperature, -math.inf)
    size = positive.sum(-1, keepdim=True)
    # Reading a count synchronizes with the GPU, so that every column is tried as the positive there.
    most = max(1, int(size.max())) if logits.device.type == "cpu" else logits.shape[1]
    inside = positive.to(logits)  # (B, R)
    counted, columns = inside.topk(most)  # (B, most): the positives come first
    weight = counted / size.clamp_min(1) / (size > 0).sum().clamp_min(1)
    lost, slope = weight.sum(), torch.zeros_like(logits)
    step = max(1, BLOCK // logits.numel())
    # On a CPU, process some rows at a time, so that a block fits into the cache of a core.
    rows = max(1, CACHED // (most * logits.shape[1])) if logits.device.type == "cpu" else len(logits)
    for parts in zip(*(matrix.split(rows) for matrix in (logits, inside, positive, columns, weight, slope)), strict=True):
        lost = lost - _gained(*parts, step=step)
    return lost.clamp_min(0), slope / temperature


def _gained(
    logits: Float[Tensor, "b R"],
    inside: Float[Tensor, "b R"],
    positive: Bool[Tensor, "b R"],
    columns: Int[Tensor, "b M"],
    weight: Float[Tensor, "b M"],
    slope: Float[Tensor, "b R"],
    *,
    step: int,
) -> Float[Tensor, ""]:
    """Return the weighted AP of some anchors, and add the gradient of the loss to `slope`."""
    gained = weight.new_zeros(())
    for column, share in zip(columns.split(step, 1), weight.split(step, 1), strict=True):
        # Columns after the positives have no weight, but their values must be finite.
        own = torch.where(share > 0, logits.gather(1, column), 0)
        before = (logits[:, None, :] - own[:, :, None]).sigmoid_()  # (b, step, R)
        # Sums are several times faster than a thousand matrix products with three rows each.
        near = (before * inside[:, None]).sum(-1)  # (b, step)
        far = before.sum(-1) - near
        near = near + 0.5  # 1, less the G(0) of p itself
        gained = gained + (share * near / (near + far)).sum()
        to_near, to_far = (share / (near + far).square() * side for side in (-far, near))  # d lost / d near and d far, (b, step)
        before.addcmul_(before, before, value=-1)  # G' = G (1 - G)
        # (b, step, R), the gradient of each difference; the terms of p itself cancel.
        change = torch.where(positive[:, None], to_near[:, :, None], to_far[:, :, None]).mul_(before)
        slope += change.sum(1)
        slope.scatter_add_(1, column, -change.sum(-1))
    return gained


@_lost.register_fake
def _shapes(similarity: Tensor, positive: Tensor, negative: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    return similarity.new_empty(()), torch.empty_like(similarity)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
    if torch.is_grad_enabled():  # the saved slope would count as a constant
        raise UnimetricError("`smooth_ap` has no gradient of its gradient", "use another loss, such as `multi_similarity`")
    return upstream * ctx.saved_tensors[0], None, None, None


_lost.register_autograd(_backward, setup_context=_save)
