"""Sums over all triplets without a B x R x R tensor, and cosines of mined triplets.

All triplets are those of a positive and a negative mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unimetric.geometry.pairs import Memory, Pairs, Triplets, match
from unimetric.geometry.sphere import unit, upcast_half

#: Maximum number of entries of an optional (B, M, R) block: 64 MiB of float32.
BLOCK = 2**24

#: Number of entries of a block that fits the cache of a core.
CACHED = 2**18


def triplet_hinges(
    far: Float[Tensor, "B R"], near: Float[Tensor, "B R"], pairs: Pairs, margin: float
) -> tuple[Float[Tensor, ""], Int[Tensor, ""], Int[Tensor, ""]]:
    """Return the sum of [far(a, p) - near(a, n) + margin]_+ over every triplet of the masks.

    No B x R x R tensor is created.

    Args:
        far: (B, R) values of the positives.
        near: (B, R) values of the negatives.
        pairs: Masks of positives and negatives.
        margin: Margin of the hinge.

    Returns:
        The sum, the number of active triplets, and the number of triplets.
    """
    total, active, _, _ = _hinges(far, near, pairs.positive, pairs.negative, margin)
    return total, active, (pairs.positive.sum(-1) * pairs.negative.sum(-1)).sum()


# A custom operator, which a compiler does not open. A graph captured for all batches could not count
# the few positives of an anchor.
@torch.library.custom_op(
    "unimetric::triplet_hinges",
    mutates_args=(),
    schema="(Tensor far, Tensor near, Tensor positive, Tensor negative, float margin)"
    " -> (Tensor total, Tensor active, Tensor to_far, Tensor to_near)",
)
def _hinges(
    far: Float[Tensor, "B R"], near: Float[Tensor, "B R"], positive: Bool[Tensor, "B R"], negative: Bool[Tensor, "B R"], margin: float
) -> tuple[Float[Tensor, ""], Int[Tensor, ""], Float[Tensor, "B R"], Float[Tensor, "B R"]]:
    """Return the sum of hinges, the number of active triplets, and the gradients.

    The gradients count the active triplets of each entry.
    """
    reach, rivals = torch.where(positive, far + margin, -math.inf), torch.where(negative, near, math.inf)
    # Reading a count would synchronize with a GPU. On a CPU it is free, and if each anchor has few
    # positives, the sort is unnecessary.
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
    # With sorted negatives and their running sums, each positive's sum is one lookup: O(R log R) per row.
    low, high = rivals.sort(-1).values, reach.sort(-1).values
    running = torch.nn.functional.pad(torch.where(low.isfinite(), low, 0).cumsum(-1), (1, 0))
    pulled = torch.where(positive, torch.searchsorted(low, reach), 0)  # number of negatives below each positive
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
    """Mine triplets and return the cosines of anchor and positive, and of anchor and negative.

    The miner receives the whole matrix without gradient. The few selected similarities are
    recomputed from their vectors, so that no B x R matrix is part of the backward pass. An anchor
    that is its own positive or negative has similarity 1, without gradient.
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
