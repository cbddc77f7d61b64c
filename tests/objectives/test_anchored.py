"""Anchors: both distances against plain loops in float64, and that a run stays nearer to its start."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from unimetric.config import RunConfig, from_settings
from unimetric.objectives import Output
from unimetric.runs.model import build_model
from unimetric.training.loop import train

LABELS = torch.arange(12) % 4


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a @ b) / (float(a @ a) * float(b @ b)) ** 0.5


def move(model: torch.nn.Module) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def test_every_term_is_its_equation(build, images) -> None:
    model, objective = build("anchored(loss='multi_similarity', weights=0.3, similarities=2.0)")
    start = copy.deepcopy(model).eval()
    move(model)
    embeddings, tokens, branches = model(images())
    terms = objective(Output(embeddings, tokens, images(), branches), LABELS)
    assert set(terms) == {"loss", "weights", "similarities"}
    both = zip(model.backbone.state_dict().values(), start.backbone.state_dict().values(), strict=True)
    squares = sum(np.square(one.numpy() - two.numpy()).sum() for one, two in both)
    assert terms["weights"].item() == pytest.approx(0.3 / 2 * squares, rel=1e-9)
    now, before = embeddings.detach(), start(images())[1][:, 0].detach()
    expected = sum((cosine(now[i], now[j]) - cosine(before[i], before[j])) ** 2 for i in range(12) for j in range(12)) / 144
    assert terms["similarities"].item() == pytest.approx(2 * expected, rel=1e-9)


def test_is_the_inner_objective_without_weights_and_at_the_start(build, take_step, images) -> None:
    expected = take_step(*build("plain"), images())
    found = take_step(*build("anchored(weights=0, similarities=0)"), images())
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    model, objective = build("anchored(weights=5.0, similarities=0)")
    found = take_step(model, objective, images())  # the distance and its gradient are zero at the start
    assert all(torch.allclose(found[name], gradient) for name, gradient in expected.items())
    assert not [key for key in objective.state_dict() if "start" in key]


def test_start_of_a_frozen_backbone_follows_it_to_a_device(build) -> None:
    model, objective = build("anchored")
    model.backbone.requires_grad_(False)
    objective.meet(model)
    model.to("meta")
    objective.begin()
    assert {parameter.device.type for parameter in objective.start[0].parameters()} == {"meta"}


def test_gradients_equal_those_of_the_large_batch_when_cached(build, take_step, images) -> None:
    text = "anchored(loss='multi_similarity', weights=0.3, similarities=2.0)"
    both = [build(text), build(f"cached(objective={text!r}, chunk=5)")]
    for model, _ in both:
        move(model)
    expected, found = (take_step(*parts, images()) for parts in both)
    assert all(torch.allclose(found[name], gradient, rtol=1e-9, atol=1e-12) for name, gradient in expected.items())


@pytest.mark.parametrize("adapter", ["", "lora(rank=2)"])
def test_a_run_stays_nearer_to_its_start(config: RunConfig, tmp_path: Path, adapter: str) -> None:
    settings = {"backbone": "timm(name='test_vit', image_size=32)", "adapter": adapter, "epochs": 1, "evaluate_every": 0}
    distance = {}
    for objective in ("plain", "anchored(weights=100.0)"):
        run = from_settings(asdict(config) | settings | {"objective": objective})
        train(run, tmp_path / objective, quiet=True)
        start, end = build_model(run).state_dict(), load_file(tmp_path / objective / "model.safetensors")
        distance[objective] = sum((end[key] - start[key]).square().sum().item() for key in end if key in start and "head" not in key)
    assert 0 < distance["anchored(weights=100.0)"] < distance["plain"] / 2
