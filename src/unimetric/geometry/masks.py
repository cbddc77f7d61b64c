"""Reductions over the masked entries of each row. An empty row gives zero, with zero gradient."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the entries that count; zero where none does."""
    return torch.where(mask, values, 0).sum() / mask.sum().clamp_min(1)


def masked_sum(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B"]:
    """Sum over each row's entries that count."""
    return torch.where(mask, values, 0).sum(-1)


def log_sum_exp(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B"]:
    """log sum exp over each row's entries that count; a very low number, without gradient, where none does."""
    low = torch.finfo(values.dtype).min / 4
    # Low, not -inf: in a row without entries -inf - -inf would make the gradient NaN.
    return torch.where(mask, values, low).logsumexp(-1)


def log1p_sum_exp(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B"]:
    """log(1 + sum exp) over each row's entries that count; zero, with zero gradient, where none does."""
    return torch.nn.functional.softplus(log_sum_exp(values, mask))


def masked_max(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B"]:
    """The largest of each row's entries that count; -inf where none does."""
    return torch.where(mask, values, -math.inf).amax(-1)


def masked_min(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B"]:
    """The smallest of each row's entries that count; +inf where none does."""
    return torch.where(mask, values, math.inf).amin(-1)


def compact_rows(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> tuple[Float[Tensor, "B M"], Bool[Tensor, "B M"]]:
    """The entries that count, moved to the front of each row, with as many columns as any row needs; as they are where that does not pay.

    Positives are few: whatever is done to them need not be done to the whole matrix. Only a CPU counts them without waiting, and a graph
    that is captured for all batches cannot.

    Args:
        values: what they are taken from.
        mask: which count.
    """
    if values.device.type != "cpu" or values.numel() < 2**17 or torch.compiler.is_compiling():
        return values, mask
    most = max(1, int(mask.sum(-1).max()))
    if most * 8 > mask.shape[1]:
        return values, mask
    kept, columns = mask.to(torch.uint8).topk(most)
    return values.gather(1, columns), kept.bool()
