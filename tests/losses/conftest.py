"""What every pair and tuple loss is tried on: a batch against itself, and a batch against a ring of earlier embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from unimetric.geometry import Memory


@dataclass(frozen=True)
class Case:
    """Classes of unequal size, one of them a single sample, with labels that float32 could not tell apart.

    `references` and `names` are what stands in the columns; `positives` and `negatives` list the columns of each anchor.
    """

    embeddings: Tensor
    labels: Tensor
    memory: Memory | None
    references: Tensor
    names: Tensor
    own: list[int]
    positives: list[list[int]]
    negatives: list[list[int]]

    @property
    def anchors(self) -> list[int]:
        return [a for a in range(len(self.labels)) if self.positives[a]]


@pytest.fixture(params=["batch", "memory"])
def case(request: pytest.FixtureRequest) -> Case:
    generator = torch.Generator().manual_seed(3)
    labels = torch.tensor([0, 1, 0, 1, 1, 2, 3, 2, 3, 4]) + 2**25
    embeddings = torch.randn(10, 6, dtype=torch.float64, generator=generator)
    if request.param == "batch":
        references, names, valid, own, memory = embeddings, labels, [True] * 10, list(range(10)), None
    else:
        # A ring of 14, not full yet: the batch lies in its rows 2 to 11, rows 12 and 13 hold nothing.
        references = torch.randn(14, 6, dtype=torch.float64, generator=generator)
        names = torch.tensor([3, 4, 0, 1, 0, 1, 1, 2, 3, 2, 3, 4, 0, 1]) + 2**25
        references[2:12] = embeddings
        valid, own = [True] * 12 + [False] * 2, list(range(2, 12))
        memory = Memory(references, names, torch.tensor(valid), torch.tensor(own))
    columns = [j for j in range(len(names)) if valid[j]]
    positives = [[j for j in columns if names[j] == labels[a] and j != own[a]] for a in range(10)]
    negatives = [[j for j in columns if names[j] != labels[a]] for a in range(10)]
    return Case(embeddings.clone().requires_grad_(), labels, memory, references, names, own, positives, negatives)


def example() -> tuple[Tensor, Tensor]:
    """Embeddings and labels of a batch, for losses with a proxy for each of six classes."""
    torch.manual_seed(0)
    return torch.randn(9, 5, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 1, 3, 3, 0, 5])


def opposite_example() -> tuple[Tensor, Tensor, Tensor]:
    """The example and proxies. The last sample is nearly opposite to its class, where the angle wraps."""
    z, y = example()
    proxies = torch.randn(6, 5, dtype=torch.float64)
    z[-1] = -proxies[5] + 0.1 * z[-1]
    return z, y, proxies
