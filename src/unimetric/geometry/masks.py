"""Reductions over the masked entries of each row.

An empty row returns zero with zero gradient.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the masked entries, or zero if there are none."""
    return torch.where(mask, values, 0).sum() / mask.sum().clamp_min(1)


def log_sum_exp(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B"]:
    """Return log sum exp over the masked entries of each row.

    A row without entries returns a very low number, without gradient.
    """
    low = torch.finfo(values.dtype).min / 4
    # Low, not -inf: in a row without entries -inf - -inf would make the gradient NaN.
    return torch.where(mask, values, low).logsumexp(-1)


def exclusion(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B R"]:
    """Return zero for masked entries and a very low number for others, to add to logits.

    An addition takes a fifth of the time of `torch.where`, and nothing in the backward pass. In a row
    without entries, the caller must cut off the gradient, as `softplus` does.
    """
    return torch.zeros_like(values).masked_fill_(~mask, torch.finfo(values.dtype).min / 4)


def at_most_zero(values: Float[Tensor, "B R"]) -> Float[Tensor, "B R"]:
    """Return min(value, 0), with a slope of 1 at 0.

    A difference to the maximum of its row is 0 for one entry of the row. The slope of `clamp` at its bound is 1 or 0, depending on
    the version of PyTorch.
    """
    return torch.where(values > 0, 0, values)


def masked_max(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B"]:
    """Return the largest masked entry of each row, or -inf if there are none."""
    return torch.where(mask, values, -math.inf).amax(-1)


def masked_min(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B"]:
    """Return the smallest masked entry of each row, or +inf if there are none."""
    return torch.where(mask, values, math.inf).amin(-1)


def compact_rows(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> tuple[Float[Tensor, "B M"], Bool[Tensor, "B M"]]:
    """Move the masked entries to the front of each row and drop unused columns.

    Positives are few, so operations on them need not run over the whole matrix. Only a CPU can
    count them without synchronizing, and a graph captured for all batches cannot.

    Args:
        values: Values to compact.
        mask: Entries to keep.

    Returns:
        The compacted values and their mask. The inputs are returned unchanged on a GPU, under
        `torch.compile`, for small inputs, or if over 1/8 of the columns are needed.
    """
    if values.device.type != "cpu" or values.numel() < 2**17 or torch.compiler.is_compiling():
        return values, mask
    most = max(1, int(mask.sum(-1).max()))
    if most * 8 > mask.shape[1]:
        return values, mask
    kept, columns = mask.to(torch.uint8).topk(most)
    return values.gather(1, columns), kept.bool()
