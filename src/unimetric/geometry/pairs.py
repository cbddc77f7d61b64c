"""Pairs and triplets of a batch, or of a batch and a memory of earlier embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unimetric.geometry.sphere import gram, unit


@dataclass(frozen=True)
class Memory:
    """References that replace the batch: a ring buffer of earlier embeddings.

    Args:
        embeddings: (R, D) embeddings, without gradient.
        labels: (R,) their labels.
        valid: (R,) mask of filled entries.
        own: (B,) column of each anchor itself.
    """

    embeddings: Float[Tensor, "R D"]
    labels: Int[Tensor, "R"]
    valid: Bool[Tensor, "R"]
    own: Int[Tensor, "B"]


@dataclass(frozen=True)
class Pairs:
    """Masks of the positive and negative references of each anchor.

    For a loss over tuples, they stand for every combination within a row.

    Args:
        positive: (B, R) same class, not the anchor itself.
        negative: (B, R) another class.
        own: (B,) column of each anchor itself.
        dim: Dimension D, on which the density of distances on the sphere depends.
    """

    positive: Bool[Tensor, "B R"]
    negative: Bool[Tensor, "B R"]
    own: Int[Tensor, "B"]
    dim: int


@dataclass(frozen=True)
class Triplets:
    """T index triplets into a (B, R) matrix.

    The anchor is a row; the positive and the negative are columns.

    Args:
        anchor, positive, negative: (T,) row and column indices.
        valid: (T,) false if an anchor had nothing to choose from. Such a triplet contributes
            nothing.
    """

    anchor: Int[Tensor, "T"]
    positive: Int[Tensor, "T"]
    negative: Int[Tensor, "T"]
    valid: Bool[Tensor, "T"]


def match(labels: Int[Tensor, "B"], memory: Memory | None = None, *, dim: int) -> Pairs:
    """Return every positive and every negative pair of a batch, or of a batch and a memory."""
    if memory is None:
        same = labels[:, None] == labels[None, :]
        own = torch.arange(len(labels), device=labels.device)
        negative = ~same
        if torch.compiler.is_compiling():
            # An in-place write forces the compiler to materialize the mask. Without one, the mask can be
            # fused into a loop.
            index = torch.arange(len(labels), device=labels.device, dtype=torch.int32)
            return Pairs(same & (index[:, None] != index[None, :]), negative, own, dim)
        return Pairs(same.fill_diagonal_(False), negative, own, dim)
    same = labels[:, None] == memory.labels[None, :]
    columns = torch.arange(len(memory.labels), device=labels.device)
    other = memory.own[:, None] != columns[None, :]
    return Pairs(same & other & memory.valid, ~same & memory.valid, memory.own, dim)


def compare(embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> tuple[Float[Tensor, "B R"], Pairs]:
    """Return the cosine similarity of every anchor to every reference, and the matching pairs."""
    anchors = unit(embeddings)
    similarity = gram(anchors) if memory is None else anchors @ unit(memory.embeddings).T
    return similarity, match(labels, memory, dim=embeddings.shape[-1])


def as_pairs(mined: Triplets, pairs: Pairs) -> Pairs:
    """Return the pairs contained in triplets, each once.

    An anchor that is its own positive adds none.
    """

    def mask(columns: Int[Tensor, "T"]) -> Bool[Tensor, "B R"]:
        seen = torch.zeros_like(pairs.positive, dtype=torch.int32)
        return seen.index_put((mined.anchor, columns), mined.valid.to(torch.int32), accumulate=True) > 0

    return Pairs(mask(mined.positive) & pairs.positive, mask(mined.negative), pairs.own, pairs.dim)


def as_indices(mined: Pairs | Triplets) -> tuple[Int[Tensor, "T"], ...]:
    """Return the index tensors of pytorch-metric-learning.

    Their lengths depend on the data, so this synchronizes with the device.

    Returns:
        Anchors, positives and negatives of triplets; or anchors and positives, then anchors and
        negatives of pairs.
    """
    if isinstance(mined, Pairs):
        return *mined.positive.nonzero(as_tuple=True), *mined.negative.nonzero(as_tuple=True)
    return mined.anchor[mined.valid], mined.positive[mined.valid], mined.negative[mined.valid]
