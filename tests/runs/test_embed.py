"""Embeddings of a GPU that does not compute the same twice."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from unimetric.errors import UnimetricError
from unimetric.images.loading import View
from unimetric.runs.embed import embed
from unimetric.spec import create

GPU = SimpleNamespace(device=torch.device("cuda"), world_size=1, global_rank=0)


class Pictures:
    """Images that are their row numbers."""

    def load(self, requests):
        for rows, _ in requests:
            yield torch.from_numpy(rows).float()[:, None]


class Unsteady(nn.Module):
    """Model that adds something to the embeddings of every call but the first."""

    def __init__(self, more):
        super().__init__()
        self.more, self.calls = more, 0

    def forward(self, images):
        self.calls += 1
        return (torch.cat([images + 1, images**2], 1) + (self.more if self.calls > 1 else 0),)


def embeddings(model, loader=None):
    return embed(GPU, model, loader or Pictures(), np.arange(10), View(create("transforms", "base")), batch=4)


def test_rounding_is_no_difference_and_the_repeated_batch_is_dropped():
    found = embeddings(Unsteady(1e-3))
    assert found.shape == (10, 2)
    assert torch.allclose(found[:, 0], torch.arange(1.0, 11.0), atol=2e-3)


def test_wrong_crops_are_named_as_the_cause():
    class Shifted(Pictures):
        def load(self, requests):
            for number, images in enumerate(super().load(requests)):
                yield images + (number == 0)

    with pytest.raises(UnimetricError, match="different crops of the same images"):
        embeddings(Unsteady(0), Shifted())


@pytest.mark.parametrize("more", [0.5, float("nan")])
def test_a_gpu_that_computes_something_else_is_an_error(more):
    with pytest.raises(UnimetricError, match="different embeddings of the same crops"):
        embeddings(Unsteady(more))


def test_a_diverged_model_is_reported_as_such():
    class Diverged(nn.Module):
        def forward(self, images):
            return (images.repeat(1, 2) * float("nan"),)

    assert embeddings(Diverged()).isnan().all()
