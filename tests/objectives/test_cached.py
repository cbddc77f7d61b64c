"""Gradient cache: equal to the large batch, the same draws in both passes, memory of one chunk."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unimetric.analysis.evaluate import evaluate
from unimetric.config import RunConfig, from_settings, load
from unimetric.errors import UnimetricError
from unimetric.objectives import Output
from unimetric.runs.model import Model, loss_of
from unimetric.spec import create
from unimetric.training.loop import train

BATCH, CLASSES = 12, 4
LABELS = torch.arange(BATCH) % CLASSES

#: Each kind of objective and loss, with a head that fits it.
KINDS = {
    "plain(loss='multi_similarity')": "linear(dim=8)",
    "plain(loss='margin')": "linear(dim=8)",
    "plain(loss='proxy_anchor')": "linear(dim=8)",
    "cross_batch(loss='contrastive', size=16, start=0)": "linear(dim=8)",
    "crt(loss='multi_similarity')": "crt(dim=8)",
    "s2sd(loss='margin', dims=(12, 16), delay=0, pool_aggr=True)": "linear(dim=8)",
    "uniform_prior(loss='margin', every=1)": "linear(dim=8)",
    "diva(loss='margin', queue=4, temperature=0.5)": "diva(dim=8)",
}


@pytest.mark.parametrize("objective", KINDS)
def test_equals_the_large_batch(objective: str, build, take_step, images) -> None:
    """Over two steps, so that memories, queues and counters take part. Chunks of 5, 5 and 2 images."""
    whole = build(objective, head=KINDS[objective])
    chunks = build(f"cached(objective={objective!r}, chunk=5)", head=KINDS[objective])
    for seed in range(2):
        expected, found = take_step(*whole, images(seed)), take_step(*chunks, images(seed))
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.allclose(found[name], gradient, rtol=1e-9, atol=1e-12 * max(1, gradient.abs().max().item())), name


def test_equals_the_large_batch_in_float32(build, take_step, images) -> None:
    whole, chunks = (build(each, dtype=torch.float32) for each in ("plain", "cached(chunk=4)"))
    expected, found = (take_step(*each, images(dtype=torch.float32)) for each in (whole, chunks))
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm().clamp_min(1e-3), name


@pytest.mark.parametrize("adapter", ["stochastic_adapter(rank=4, keep=0.5)", "puma(rank=4)"])
def test_both_passes_draw_the_same(adapter: str, build, take_step, images) -> None:
    """The reference keeps the graph of all chunks, and draws once."""
    model, objective = build("cached(loss='multi_similarity', chunk=4)", adapter=adapter)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # branches that start at zero would hide their gates
    torch.manual_seed(7)
    found = take_step(model, objective, images())
    state = torch.get_rng_state()
    torch.manual_seed(7)
    model.zero_grad()
    embeddings = torch.cat([model(chunk)[0] for chunk in images().split(4)])
    create("losses", "multi_similarity")(embeddings, LABELS).backward()
    assert torch.equal(torch.get_rng_state(), state)  # the second pass leaves no trace
    trained = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert trained and all(torch.allclose(found[name], gradient, rtol=1e-9, atol=1e-14) for name, gradient in trained.items())
    assert not torch.equal(take_step(model, objective, images())["loss"], found["loss"])  # the next step draws others


def test_statistics_are_updated_once_per_chunk(take_step, images) -> None:
    torch.manual_seed(0)
    model = Model(create("backbones", "small(channels=8)"), create("heads", "linear(dim=8)", features=8, seed=0)).double().train()
    other = copy.deepcopy(model)
    sizes = {"dim": 8, "branches": (8,), "features": 8, "num_classes": CLASSES, "batch_size": BATCH}
    take_step(model, create("objectives", "cached(chunk=4)", **sizes).double(), images())
    with torch.no_grad():
        for chunk in images().split(4):
            other(chunk)
    assert all(torch.equal(one, two) for one, two in zip(model.buffers(), other.buffers(), strict=True))


def test_a_scaled_loss_is_scaled_once(build, take_step, images) -> None:
    """As in float16, where the backward pass multiplies the loss by a power of two."""
    plain = take_step(*build("cached(chunk=4)"), images())
    model, objective = build("cached(chunk=4)")
    embeddings, tokens, branches = objective.forward_pass(model, images())
    loss = torch.stack(list(objective(Output(embeddings, tokens, images(), branches), LABELS).values())).sum()
    objective.backward_pass(loss, lambda tensor: (2.0**10 * tensor).backward())
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad / 2**10, plain[name], rtol=1e-12), name


def test_a_run_equals_the_plain_run(config: RunConfig, tmp_path: Path, build) -> None:
    """Nearly: sums of chunks round differently. It resumes like any other, and is evaluated as the plain model."""
    settings = {"backbone": "timm(name='test_vit', image_size=32)", "epochs": 1, "evaluate_every": 0, "optimizer": "sgd(lr=0.1)"}
    for name, objective in {"plain": "plain", "cached": "cached(chunk=5)"}.items():
        train(from_settings(vars(config) | settings | {"objective": objective}), tmp_path / name, quiet=True)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "cached"))
    start = build("plain")[0].state_dict()
    moved = max((one[key] - start[key].float()).abs().max().item() for key in one)
    assert moved > 1e-3
    assert max((one[key] - two[key]).abs().max().item() for key in one) < 1e-4 * moved
    assert evaluate(tmp_path / "cached") == pytest.approx(evaluate(tmp_path / "plain"))


def test_rejects_what_combines_images_of_the_batch(build) -> None:
    with pytest.raises(UnimetricError, match="`mixup` combines"):
        build("cached(objective='mixup')")
    with pytest.raises(UnimetricError, match="no `nothing` in objectives"):
        load(objective="cached(objective='nothing')")


def test_the_loss_is_that_of_the_inner_objective() -> None:
    assert loss_of(load(objective="cached(objective=\"s2sd(loss='triplet')\")")) == "triplet"
    assert loss_of(load(objective="cached(loss='triplet')")) == "triplet"
    assert loss_of(load(objective="cached", loss="contrastive")) == "contrastive"


class Held:
    """Tensor that a backward pass waits for, counted while it lives."""

    now = most = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        Held.now += tensor.numel()
        Held.most = max(Held.most, Held.now)

    def __del__(self) -> None:
        Held.now -= self.tensor.numel()


def test_memory_is_that_of_a_chunk(build, take_step, images) -> None:
    """Chunks of three images hold what a batch of three holds, weights included."""

    def most(objective: str, count: int) -> int:
        parts = build(objective)
        Held.now = Held.most = 0
        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
            take_step(*parts, images()[:count])
        return Held.most

    small, cached, large = most("plain", 3), most("cached(chunk=3)", 12), most("plain", 12)
    assert cached < 1.05 * small < large / 1.5
