"""The uniform prior: the network's term, and the discriminator's own steps."""

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from unimetric.config import load
from unimetric.errors import UnimetricError
from unimetric.objectives import Output
from unimetric.objectives.uniform_prior import UniformPrior
from unimetric.runs.model import Model
from unimetric.spec import create
from unimetric.training.build import build_optimizer

DIM, FEATURES, BATCH = 4, 12, 6
LABELS = torch.arange(BATCH) // 2


def build(**arguments):
    torch.manual_seed(0)
    settings = {"loss": "multi_similarity", "chunk": 4, "hidden": 5, "lr": 1e-2} | arguments
    return UniformPrior(num_classes=3, dim=DIM, features=FEATURES, **settings).double()


def output(seed=0):
    torch.manual_seed(seed)
    z, tokens = torch.randn(BATCH, DIM).double().requires_grad_(), torch.randn(BATCH, 3, FEATURES).double().requires_grad_()
    return Output(z, tokens, torch.zeros(BATCH, 3, 2, 2))


def step(objective, given):
    terms = objective(given, LABELS)
    with torch.no_grad():
        objective.stepped()
    return terms


def naive_score(discriminator, chunk):
    layers = [layer for layer in discriminator.layers if hasattr(layer, "weight")]
    for number, layer in enumerate(layers):
        chunk = [
            sum(float(w) * x for w, x in zip(row, chunk, strict=True)) + float(b) for row, b in zip(layer.weight, layer.bias, strict=True)
        ]
        if number < 2:
            chunk = [max(0.0, x) for x in chunk]
    return 1 / (1 + math.exp(-chunk[0]))


@pytest.mark.parametrize("on_embedding", [False, True])
def test_the_terms_are_their_equations(on_embedding):
    objective, given = build(weight=0.7, on_embedding=on_embedding), output()
    terms = objective(given, LABELS)
    values = given.embeddings if on_embedding else given.tokens[:, 0]
    chunks = [values[i, k : k + 4].tolist() for i in range(BATCH) for k in range(0, values.shape[1], 4)]
    assert len(chunks) == BATCH * (1 if on_embedding else 3)
    expected = 0.7 * sum(-math.log(naive_score(objective.discriminator, chunk)) for chunk in chunks) / len(chunks)
    assert math.isclose(terms["prior"].item(), expected, rel_tol=1e-9)
    assert math.isclose(terms["loss"].item(), create("losses", "multi_similarity")(given.embeddings, LABELS).item(), rel_tol=1e-9)


def test_the_prior_moves_the_features_and_not_the_discriminator():
    objective, given = build(), output()
    objective(given, LABELS)["prior"].backward()
    assert given.tokens.grad[:, 0].abs().min() > 0
    assert all(parameter.grad is None for parameter in objective.discriminator.parameters())


def test_the_discriminator_steps_by_its_own_adam_every_so_often():
    """Against cross-entropy of the sigmoid, with even points from the same dice."""
    objective = build(every=3)
    reference, dice = copy.deepcopy(objective.discriminator).requires_grad_(True), copy.deepcopy(objective.dice)
    adam = torch.optim.Adam(reference.parameters(), lr=1e-2, betas=(0.5, 0.999))
    for number in range(7):
        given = output(number)
        step(objective, given)
        if number % 3 == 0:
            chunks = given.tokens.detach()[:, 0].reshape(-1, 4)
            even = dice(chunks.numel()).view_as(chunks).double() * 2 - 1
            assert -1 <= even.min() < -0.8
            assert 0.8 < even.max() < 1
            real, fake = reference(even).sigmoid(), reference(chunks).sigmoid()
            loss = F.binary_cross_entropy(real, torch.ones_like(real)) + F.binary_cross_entropy(fake, torch.zeros_like(fake))
            adam.zero_grad()
            loss.backward()
            adam.step()
        for ours, theirs in zip(objective.discriminator.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, check_stride=False)
            assert not ours.requires_grad


def test_the_discriminator_learns_to_tell():
    objective, given = build(every=1, hidden=20), output()
    before = objective.verdict(given.tokens.detach()[:, 0].reshape(-1, 4)).item()
    for _ in range(200):
        step(objective, given)
    assert objective.verdict(given.tokens.detach()[:, 0].reshape(-1, 4)).item() < 0.8 * before


def test_it_goes_on_in_the_middle_of_the_count():
    unbroken, broken = build(every=3), build(every=3)
    for number in range(4):
        step(unbroken, output(number))
        step(broken, output(number))
    resumed = build(every=3)
    resumed.load_state_dict(broken.state_dict())
    resumed.optimizers["discriminator"].load_state_dict(broken.optimizers["discriminator"].state_dict())
    for number in range(4, 8):
        assert step(unbroken, output(number))["prior"].item() == step(resumed, output(number))["prior"].item()


def test_the_discriminator_is_in_no_other_optimiser():
    objective = build(loss="margin")
    backbone = create("backbones", "small(channels=16)")
    model = Model(backbone, create("heads", "linear(dim=4)", features=16))
    groups = build_optimizer(load(), model, objective).param_groups
    assert [group["name"] for group in groups] == ["backbone", "head", "loss"]
    assert objective.optimizers["discriminator"].param_groups[0]["betas"] == (0.5, 0.999)


def test_features_that_do_not_fall_into_chunks():
    with pytest.raises(UnimetricError, match="chunks of 5") as error:
        build(chunk=5)
    assert "chunk=4" in error.value.hint
    assert build(chunk=128).chunk == FEATURES


@pytest.mark.parametrize("key", ["chunk", "every"])
def test_none_at_all_is_refused(key):
    with pytest.raises(UnimetricError, match=f"`{key}` must be at least 1, got 0"):
        build(**{key: 0})
