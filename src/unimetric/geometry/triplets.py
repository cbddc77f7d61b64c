"""Sums over all triplets of two masks without a B x R x R tensor, and similarities of mined triplets."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unimetric.geometry.pairs import Memory, Pairs, Triplets, match
from unimetric.geometry.sphere import unit, upcast_half

#: Numbers in the largest (B, M, R) block that is made where there is a choice: 64 MiB of float32.
BLOCK = 2**24

#: Numbers in a block that stays in a core's cache.
CACHED = 2**18


def triplet_hinges(
    far: Float[Tensor, "B R"], near: Float[Tensor, "B R"], pairs: Pairs, margin: float
) -> tuple[Float[Tensor, ""], Int[Tensor, ""], Int[Tensor, ""]]:
    """Sum of [far(a, p) - near(a, n) + margin]_+ over every triplet of the masks, how many are active, and how many there are.

    No B x R x R tensor is made.
    """
    total, active, _, _ = _hinges(far, near, pairs.positive, pairs.negative, margin)
    return total, active, (pairs.positive.sum(-1) * pairs.negative.sum(-1)).sum()


# An operator of its own, which a compiler leaves whole: captured for all batches, it could not count an anchor's few positives.
@torch.library.custom_op(
    "unimetric::triplet_hinges",
    mutates_args=(),
    schema="(Tensor far, Tensor near, Tensor positive, Tensor negative, float margin)"
    " -> (Tensor total, Tensor active, Tensor to_far, Tensor to_near)",
)
def _hinges(
    far: Float[Tensor, "B R"], near: Float[Tensor, "B R"], positive: Bool[Tensor, "B R"], negative: Bool[Tensor, "B R"], margin: float
) -> tuple[Float[Tensor, ""], Int[Tensor, ""], Float[Tensor, "B R"], Float[Tensor, "B R"]]:
    """The sum, how many are active, and the gradients of the sum, which count them for each entry."""
    reach, rivals = torch.where(positive, far + margin, -math.inf), torch.where(negative, near, math.inf)
    # To read a count makes a GPU wait. A CPU waits for nothing, and where an anchor has few positives does without the sort.
    most = max(1, int(positive.sum(-1).max())) if far.device.type == "cpu" else far.shape[1]
    if most * 8 <= far.shape[1] and most <= 64:
        reach, columns = reach.topk(most)  # (B, M)
        total, pulled, pushed = far.new_zeros(()), torch.empty_like(reach), torch.empty_like(near)
        step = max(1, CACHED // (most * far.shape[1]))  # rows at a time
        for start in range(0, len(far), step):
            rows = slice(start, start + step)
            hinge = (reach[rows, :, None] - rivals[rows, None, :]).relu_()  # (step, M, R)
            total += hinge.sum()
            violated = hinge.sign_()
            torch.sum(violated, -1, out=pulled[rows])
            torch.sum(violated, 1, out=pushed[rows])
        return total, pulled.sum(dtype=torch.float64).long(), torch.zeros_like(far).scatter_(1, columns, pulled), pushed.neg_()
    # Sorted negatives and their running sums give each positive its sum at once: O(R log R) a row.
    low, high = rivals.sort(-1).values, reach.sort(-1).values
    running = torch.nn.functional.pad(torch.where(low.isfinite(), low, 0).cumsum(-1), (1, 0))
    pulled = torch.where(positive, torch.searchsorted(low, reach), 0)  # how many negatives lie below each positive
    total = torch.where(positive, pulled * reach - running.gather(-1, pulled), 0).sum()
    pushed = torch.where(negative, far.shape[1] - torch.searchsorted(high, rivals, right=True), 0)
    return total, pulled.sum(), pulled.to(far.dtype), -pushed.to(far.dtype)


@_hinges.register_fake
def _shapes(far: Tensor, near: Tensor, positive: Tensor, negative: Tensor, margin: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return far.new_empty(()), far.new_empty((), dtype=torch.int64), torch.empty_like(far), torch.empty_like(near)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[2:])


def _backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    to_far, to_near = ctx.saved_tensors
    return upstream * to_far, upstream * to_near, None, None, None


_hinges.register_autograd(_backward, setup_context=_save)


def triplet_cosines(
    miner: Any, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None
) -> tuple[Triplets, Float[Tensor, "T"], Float[Tensor, "T"]]:
    """What a miner of triplets finds, and the cosine similarities of anchor and positive, and of anchor and negative.

    The miner sees the whole matrix without gradient. The few that it chose are made again from their vectors, so that no B x R matrix
    goes through the backward pass. An anchor that is its own positive or negative has the similarity 1, without gradient.
    """
    anchors = unit(upcast_half(embeddings))
    references = anchors if memory is None else unit(upcast_half(memory.embeddings))
    pairs = match(labels, memory, dim=anchors.shape[-1])
    mined = miner(anchors.detach() @ references.detach().T, pairs)
    rows = anchors.index_select(0, mined.anchor)
    near = (rows * references.index_select(0, mined.positive)).sum(-1)
    far = (rows * references.index_select(0, mined.negative)).sum(-1)
    own = pairs.own[mined.anchor]
    return mined, torch.where(mined.positive == own, 1, near), torch.where(mined.negative == own, 1, far)
