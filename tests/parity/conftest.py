"""Batches, and the check that two computations agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from .compared import difference, differentiate


@pytest.fixture
def agree(request: pytest.FixtureRequest) -> Callable[[Any, Any], None]:
    """Assert that two values, or two lists of them, agree within the tolerance of the test's comparison."""
    within = request.function.comparison.within

    def check(ours: Any, theirs: Any) -> None:
        if not isinstance(ours, Sequence):
            ours, theirs = [ours], [theirs]
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert difference(mine, other) <= within, f"entry {number} differs by {difference(mine, other):.1e}"

    return check


@pytest.fixture
def agree_slopes(agree: Callable[[Any, Any], None]) -> Callable[..., None]:
    """Assert that two scalars agree, and their gradients with respect to some leaves."""

    def check(ours: Tensor, theirs: Tensor, *leaves: Tensor) -> None:
        agree(differentiate(ours, *leaves), differentiate(theirs, *leaves))

    return check


@dataclass(frozen=True)
class Batch:
    """Embeddings that require a gradient, labels 0 to C - 1 in random order, one triplet per anchor.

    Args:
        raw: (24, 32) embeddings before normalization, float64.
        labels: (24,).
        triplets: (anchor, positive, negative) indices.
        classes: C.
        dim: 32.
    """

    raw: Tensor
    labels: Tensor
    triplets: list[tuple[int, int, int]]
    classes: int
    dim: int

    @property
    def unit(self) -> Tensor:
        """Unit embeddings, which the authors' networks pass to a loss."""
        return self.raw / self.raw.norm(dim=1, keepdim=True)

    def proxies(self, *shape: int) -> Tensor:
        """Random class directions, float64."""
        return torch.randn(*shape, self.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(99))


def make_batch(per_class: int, seed: int, size: int = 24, dim: int = 32, spread: float = 1.0) -> Batch:
    """Draw a batch around one center per class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size).div(per_class, rounding_mode="floor")[torch.randperm(size, generator=generator)]
    centers = torch.randn(size // per_class, dim, dtype=torch.float64, generator=generator)
    raw = 0.7 * centers[labels] + spread * torch.randn(size, dim, dtype=torch.float64, generator=generator)
    triplets = []
    for a in range(size):
        same, other = labels == labels[a], labels != labels[a]
        same[a] = False
        drawn = [int(torch.multinomial(mask.double(), 1, generator=generator)) for mask in (same, other)]
        triplets.append((a, drawn[0], drawn[1]))
    return Batch(raw.requires_grad_(), labels, triplets, size // per_class, dim)


@pytest.fixture(params=[(2, 0), (2, 1), (4, 0), (4, 1)], ids=lambda given: f"spc{given[0]}-seed{given[1]}")
def batch(request: pytest.FixtureRequest) -> Batch:
    return make_batch(*request.param)
