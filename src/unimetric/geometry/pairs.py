"""Pairs and triplets of a batch, or of a batch and a memory of earlier embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unimetric.geometry.sphere import gram, unit


@dataclass(frozen=True)
class Memory:
    """References that stand in for the batch: a ring of earlier embeddings.

    Args:
        embeddings: (R, D), without gradient.
        labels: (R,).
        valid: (R,) false where the ring is not filled yet.
        own: (B,) the column in which each anchor itself stands.
    """

    embeddings: Float[Tensor, "R D"]
    labels: Int[Tensor, "R"]
    valid: Bool[Tensor, "R"]
    own: Int[Tensor, "B"]


@dataclass(frozen=True)
class Pairs:
    """Which references belong to an anchor, as two masks. To a loss over tuples it means every combination within a row.

    Args:
        positive: (B, R) same class, not the anchor itself.
        negative: (B, R) another class.
        own: (B,) the column in which each anchor itself stands.
        dim: D, which the density of distances on the sphere depends on.
    """

    positive: Bool[Tensor, "B R"]
    negative: Bool[Tensor, "B R"]
    own: Int[Tensor, "B"]
    dim: int


@dataclass(frozen=True)
class Triplets:
    """T index triplets into the rows (anchor) and columns (positive, negative) of a (B, R) matrix, and which of them count.

    Args:
        anchor, positive, negative: (T,).
        valid: (T,) false where an anchor had nothing to choose from; such a triplet adds nothing anywhere.
    """

    anchor: Int[Tensor, "T"]
    positive: Int[Tensor, "T"]
    negative: Int[Tensor, "T"]
    valid: Bool[Tensor, "T"]


def match(labels: Int[Tensor, "B"], memory: Memory | None = None, *, dim: int) -> Pairs:
    """Every positive and every negative pair of a batch, or of a batch and a memory."""
    if memory is None:
        same = labels[:, None] == labels[None, :]
        own = torch.arange(len(labels), device=labels.device)
        negative = ~same
        if torch.compiler.is_compiling():  # whatever is written into has to be made first: a mask that is not can stay within a loop
            places = torch.arange(len(labels), device=labels.device, dtype=torch.int32)
            return Pairs(same & (places[:, None] != places[None, :]), negative, own, dim)
        return Pairs(same.fill_diagonal_(False), negative, own, dim)
    same = labels[:, None] == memory.labels[None, :]
    columns = torch.arange(len(memory.labels), device=labels.device)
    other = memory.own[:, None] != columns[None, :]
    return Pairs(same & other & memory.valid, ~same & memory.valid, memory.own, dim)


def compare(embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> tuple[Float[Tensor, "B R"], Pairs]:
    """Cosine similarity of every anchor to every reference, and which pairs match."""
    anchors = unit(embeddings)
    similarity = gram(anchors) if memory is None else anchors @ unit(memory.embeddings).T
    return similarity, match(labels, memory, dim=embeddings.shape[-1])


def as_pairs(mined: Triplets, pairs: Pairs) -> Pairs:
    """The pairs that triplets are made of, each once; an anchor that is its own positive makes none."""

    def mask(columns: Int[Tensor, "T"]) -> Bool[Tensor, "B R"]:
        seen = torch.zeros_like(pairs.positive, dtype=torch.int32)
        return seen.index_put((mined.anchor, columns), mined.valid.to(torch.int32), accumulate=True) > 0

    return Pairs(mask(mined.positive) & pairs.positive, mask(mined.negative), pairs.own, pairs.dim)
