"""A small vision transformer, an objective that has met it, and one step of both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from unimetric.geometry import seed_dice
from unimetric.objectives import Output
from unimetric.runs.model import Model
from unimetric.spec import create

BATCH, CLASSES = 12, 4
LABELS = torch.arange(BATCH) % CLASSES


def make(objective: str, *, head: str = "linear(dim=8)", adapter: str = "", dtype: torch.dtype = torch.float64) -> tuple[Model, nn.Module]:
    torch.manual_seed(0)
    backbone = create("backbones", "timm(name='test_vit', image_size=32)")
    if adapter:
        backbone = create("adapters", adapter, backbone=backbone)
    model = Model(backbone, create("heads", head, features=backbone.channels, seed=0)).to(dtype)
    sizes = {"dim": model.dim, "branches": model.dims, "features": model.channels}
    made = create("objectives", objective, num_classes=CLASSES, batch_size=BATCH, **sizes).to(dtype)
    made.meet(model)
    seed_dice(made, 0)
    return model, made


def step(model: nn.Module, objective: nn.Module, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    """One step as in the loop, without an optimizer. Returns the gradients by name."""
    objective.begin()
    embeddings, tokens, branches = objective.forward_pass(model, pixels)
    output = Output(embeddings, tokens, pixels, branches, (pixels.flip(3),) * (objective.views - 1))
    loss = torch.stack(list(objective(output, LABELS[: len(pixels)]).values())).sum()
    for part in (model, objective):
        part.zero_grad()
    objective.backward_pass(loss, lambda tensor: tensor.backward())
    with torch.no_grad():
        objective.stepped()
    named = [
        *model.named_parameters(),
        *((f"objective.{name.removeprefix('inner.')}", each) for name, each in objective.named_parameters()),
    ]
    return {name: each.grad for name, each in named if each.grad is not None} | {"loss": loss.detach()}


def draw(seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture
def build() -> Callable[..., tuple[Model, nn.Module]]:
    return make


@pytest.fixture
def take_step() -> Callable[..., dict[str, torch.Tensor]]:
    return step


@pytest.fixture
def images() -> Callable[..., torch.Tensor]:
    return draw
