"""Objectives next to the code of ooDML (Milbich et al. 2021), DiVA (Milbich et al. 2020) and S2SD (Roth et al. 2021)."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from unimetric.geometry import compare, draw, match
from unimetric.objectives import Output
from unimetric.objectives.diva import Diva
from unimetric.objectives.s2sd import S2SD
from unimetric.objectives.uniform_prior import UniformPrior
from unimetric.spec import create

from . import reference_oodml as theirs
from .compared import Given, compared, difference, differentiate
from .conftest import make_batch
from .reference_revisiting import directions, margin

B, D = 16, 12
LABELS = torch.arange(B) // 2


def leaves(count, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(count)]


def output(branches, views=()):
    return Output(torch.cat(branches, 1), torch.zeros(B, 2, 4), torch.zeros(B, 3, 2, 2), tuple(branches), views)


def diva(**arguments):
    torch.manual_seed(0)
    settings = {"auxiliary": "margin(or_count=True)", "loss": "margin(or_count=True)", "hidden": 20, "queue": 3} | arguments
    return Diva(num_classes=8, branches=(D,) * 4, batch_size=B, **settings).double()


# --- DiVA ------------------------------------------------------------------------------------------------------------


@compared(
    "objectives/diva",
    theirs="ooDML criteria/adversarial_separation.py:53",
    note="Adversary. The paper sums over dimensions: its rho is D times smaller.",
)
def test_adversary(agree):
    objective, branches = diva(rho=100.0), leaves(4, B, D)
    weights = list(objective.regressors.parameters())
    ours = differentiate(objective(output(branches), LABELS)["adversary"], *branches, *weights)
    disc, *sources = branches
    plain = sum(theirs.adversary(network, source, disc, 100.0) for network, source in zip(objective.regressors, sources, strict=True))
    value, *slopes = differentiate(plain, *branches, *weights)
    agree(ours, [value, *(-slope for slope in slopes[:4]), *slopes[4:]])  # reversed for the heads, not for the regressors


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (0.75, 1.25, 1.25, 1.25), (0.5, 1.5, 1.5, 1.5)])
@compared(
    "heads/diva",
    theirs="ooDML metrics/__init__.py:83",
    flag="weights=(0.5, 1.5, 1.5, 1.5)",
    note="The authors report the best of three weightings; a run reports all three.",
)
def test_join(agree, weights):
    head, branches = create("heads", f"diva(dim={D}, weights={weights})", features=8), [x.detach() for x in leaves(4, B, D)]
    expected = theirs.join(branches, weights)
    agree(head.join(tuple(branches)), expected)
    other = create("heads", f"diva(dim={D}, weights=(0.3, 1, 2, 3))", features=8)
    agree(other.variants(other.join(tuple(branches)))[f"weights={','.join(f'{w:g}' for w in weights)}"], expected)


def dance_over_steps(agree, fixed, **arguments):
    """Fill the queue, then compare value and gradient over the steps in which it turns over."""
    objective, queue = diva(own=1.0, temperature=0.3, **arguments), []
    for step in range(8):
        query, key = leaves(2, B, D, seed=step)
        expected = (
            theirs.dance(directions(query), directions(key.detach()), torch.cat(queue), 0.3, fixed=fixed) if len(queue) == 3 else None
        )
        ours = objective._dance(directions(query), directions(key.detach()))
        if expected is not None:
            agree(differentiate(ours, query), differentiate(expected, query))
        queue = [*queue, directions(key.detach())][-3:]


@compared(
    "objectives/diva",
    theirs="DiVA criteria/fast_moco.py:112 with --diva_fixed",
    note="DaNCE with a full queue. Theirs fills the queue before training, here the first batches fill it.",
)
def test_dance(agree):
    dance_over_steps(agree, fixed=True)


@compared(
    "objectives/diva",
    theirs="ooDML criteria/fast_moco.py:114",
    verdict="equal with the option",
    flag="column_weights=True",
    note="DaNCE: weights normalized over the batch instead of per query.",
)
def test_dance_column_weights(agree):
    dance_over_steps(agree, fixed=False, column_weights=True)


def thresholds(loss, low=0.6, high=1.4):
    with torch.no_grad():
        loss.beta.copy_(torch.linspace(low, high, len(loss.beta)).double())
    return loss.beta


@compared(
    "objectives/diva",
    theirs="DiVA batchminer/intra_random.py:18",
    verdict="equal with the option",
    flag="auxiliary='margin(or_count=True)'",
    within=1e-9,
    note="Intra head: every triplet counts, also one whose negative is the anchor. `intra_triplets='distinct'` drops those.",
)
def test_intra_all(agree):
    objective, branches = diva(intra=1.0), leaves(4, B, D)
    beta = thresholds(objective.intra_loss)
    mined = copy.deepcopy(objective.intra_loss.miner)(torch.zeros(B, B), match(LABELS, dim=D))
    triplets = torch.stack([mined.anchor, mined.positive, mined.negative], 1).tolist()
    assert any(a == n for a, _, n in triplets)
    ours = differentiate(objective(output(branches), LABELS)["intra"], branches[3], beta)
    agree(ours, differentiate(margin(directions(branches[3]), LABELS, triplets, beta), branches[3], beta))
    distinct = diva(intra=1.0, intra_triplets="distinct")
    thresholds(distinct.intra_loss)
    assert difference(distinct(output(branches), LABELS)["intra"], ours[0]) > 0.01


@compared("objectives/diva", theirs="DiVA batchminer/intra_random.py:17", within=1e-6, note="Intra head: probability of every triplet.")
def test_intra_probabilities(agree, monkeypatch):
    recorded = []

    def record(weights, numbers):
        weights = weights.double()
        recorded.append((weights / weights.sum(-1, keepdim=True)).numpy())
        return draw(weights, numbers)

    monkeypatch.setattr("unimetric.objectives.diva.draw", record)
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3, 3, 3])
    expected = np.zeros((10, 10, 10))
    for triplet, chance in theirs.within_class(labels).items():
        expected[triplet] = chance
    found = np.zeros((10, 10, 10))
    miner = diva().intra_loss.miner
    for _ in range(60):
        recorded.clear()
        mined = miner(torch.zeros(10, 10), match(labels, dim=D))
        assert mined.valid.all()
        anchors, positives, negatives = recorded
        for row, a in enumerate(mined.anchor.tolist()):
            found[a] = anchors[row][a] * np.outer(positives[row], negatives[row])
    agree(found, expected)


def permuted_head(objective, head, branch, labels, order):
    """The thresholds of a head on permuted labels, and the triplets that its miner is about to draw."""
    loss = objective.shared_loss if head == "shared" else objective.intra_loss
    mined = copy.deepcopy(loss.miner)(*compare(branch.detach(), labels[order]))
    return loss.beta, torch.stack([mined.anchor, mined.positive, mined.negative], 1).tolist()


@pytest.mark.parametrize("equal_thresholds", [True, False])
@compared(
    "objectives/diva",
    theirs="ooDML batchminer/random_distance.py:13",
    verdict="deviates by choice",
    within=1e-9,
    note="Shared head: the triplets of permuted labels are equal. The margin's threshold is that of the permuted label; theirs is that of "
    "the true label. The two are equal as long as all thresholds are.",
)
def test_shared(agree, equal_thresholds):
    objective, branches = diva(shared=1.0), leaves(4, B, D)
    beta = thresholds(objective.shared_loss, 1.2, 1.2 if equal_thresholds else 1.5)
    order = copy.deepcopy(objective.dice)(B).argsort(stable=True)
    beta, triplets = permuted_head(objective, "shared", branches[1], LABELS, order)
    ours = differentiate(objective(output(branches), LABELS)["shared"], branches[1], beta)
    unit = directions(branches[1])
    permuted = differentiate(margin(unit, LABELS[order], triplets, beta), branches[1], beta)
    true = differentiate(margin(unit, LABELS, triplets, beta), branches[1], beta)
    agree(ours, permuted)
    if equal_thresholds:
        agree(ours[:2], true[:2])
    else:
        assert difference(ours[0], true[0]) > 1e-4


@compared(
    "objectives/diva",
    theirs="ooDML ood_diva_main.py:220",
    verdict="equal with the option",
    flag="intra_triplets='permuted', auxiliary='margin(or_count=True)'",
    within=1e-9,
    note="Intra head of ooDML's script: permuted labels, as in the shared head, with another permutation.",
)
def test_intra_permuted(agree_slopes):
    objective, branches = diva(intra=1.0, intra_triplets="permuted"), leaves(4, B, D)
    numbers = copy.deepcopy(objective.dice)
    first, order = (numbers(B).argsort(stable=True) for _ in range(2))
    assert first.tolist() != order.tolist()
    beta, triplets = permuted_head(objective, "intra", branches[3], LABELS, order)
    agree_slopes(objective(output(branches), LABELS)["intra"], margin(directions(branches[3]), LABELS, triplets, beta), branches[3])


@compared("objectives/diva", theirs="ooDML ood_diva_main.py:364", note="Moving average of the key network, 0.9 of it per step.")
def test_moving_average(agree):
    objective, student = diva(), torch.nn.Linear(4, 3).double()
    objective.meet(student)
    before = [p.clone() for p in objective.teacher.parameters()]
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 1 + torch.rand_like(parameter)
        objective.stepped()
    agree(list(objective.teacher.parameters()), [0.9 * old + 0.1 * new for old, new in zip(before, student.parameters(), strict=True)])


# --- S2SD ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool_aggr", [False, True])
@compared(
    "objectives/s2sd",
    theirs="ooDML criteria/s2sd.py:123",
    verdict="equal with the option",
    flag="loss='margin(or_count=True)'",
    within=1e-10,
    note="The whole loss: three branches, pooling on and off, features after the delay. With `or_count=False` a weight of 50 acts like 88.",
)
def test_s2sd(agree, pool_aggr):
    batch = make_batch(2, 0, size=B, dim=D)
    feature_map = leaves(1, B, 6, 14, seed=5)[0]

    def build(or_count):
        torch.manual_seed(0)
        objective = S2SD(
            loss=f"margin(or_count={or_count})", dims=(10, 16, 20), delay=1, pool_aggr=pool_aggr, num_classes=8, dim=D, features=14
        ).double()
        for loss in (objective.loss, *objective.losses):
            thresholds(loss)
            loss.miner = Given(batch.triplets)
        return objective

    def total(objective):
        tokens = torch.cat([feature_map.mean(1, keepdim=True), feature_map], 1)
        return sum(objective(Output(batch.raw, tokens, torch.zeros(B, 3, 2, 2)), batch.labels).values())

    objective, other = build(True), build(False)
    betas = [loss.beta for loss in (objective.loss, *objective.losses)]
    trained = [batch.raw, feature_map, *objective.targets.parameters(), *betas]
    for step in range(2):
        expected = theirs.s2sd(
            batch.raw, feature_map, batch.labels, batch.triplets, objective.targets, betas, pool_aggr=pool_aggr, with_features=step >= 1
        )
        agree(differentiate(total(objective), *trained), differentiate(expected, *trained))
        assert difference(total(other), expected) > 0.005


# --- Uniform Prior ---------------------------------------------------------------------------------------------------


def uniform_prior(**arguments):
    torch.manual_seed(0)
    settings = {"loss": "multi_similarity", "chunk": 4, "hidden": 10, "lr": 1e-2, "every": 3, "weight": 0.2} | arguments
    return UniformPrior(num_classes=8, dim=D, features=12, **settings).double()


def linear_layers(network):
    return [layer for layer in network.modules() if isinstance(layer, torch.nn.Linear)]


def run_prior(steps, step_first):
    """Run both side by side, theirs with the discriminator's step before or after the network's."""
    objective = uniform_prior()
    reference, numbers = copy.deepcopy(objective.discriminator).requires_grad_(True), copy.deepcopy(objective.dice)
    layers = linear_layers(reference)
    adam = theirs.Adam(list(reference.parameters()), lr=1e-2)
    ours, expected = [], []
    for step in range(steps):
        z, features = leaves(2, B, D, seed=step)
        given = Output(z, torch.stack([features, features], 1), torch.zeros(B, 3, 2, 2))
        ours.append(differentiate(objective(given, LABELS)["prior"], features))
        with torch.no_grad():
            objective.stepped()

        def train(step=step, features=features):
            if step % 3 == 0:
                uniform = 2 * numbers(features.numel()).view(-1, 4).double() - 1
                adam.step(torch.autograd.grad(theirs.verdict(layers, features, uniform, 4), list(reference.parameters())))

        if step_first:
            train()
        expected.append(differentiate(theirs.prior(layers, features, 4, 0.2), features))
        if not step_first:
            train()
    return ours, expected, list(objective.discriminator.parameters()), list(reference.parameters())


@compared(
    "objectives/uniform_prior",
    theirs="ooDML ood_main.py:341",
    within=1e-10,
    note="The prior and its gradient, and the discriminator over 7 steps.",
)
def test_uniform_prior(agree):
    ours, expected, mine, other = run_prior(7, step_first=False)
    for pair in zip(ours, expected, strict=True):
        agree(*pair)
    agree(mine, other)


@compared(
    "objectives/uniform_prior",
    theirs="ooDML ood_main.py:336",
    verdict="deviates by choice",
    within=None,
    note="Their discriminator steps before the network's prior of the same iteration, here after it. One prior in `every` steps "
    "uses a discriminator with one step fewer.",
)
def test_uniform_prior_order():
    ours, expected, mine, other = run_prior(7, step_first=True)
    assert all(difference(a, b) < 1e-10 for a, b in zip(mine, other, strict=True))
    apart = [difference(a[0], b[0]) > 1e-4 for a, b in zip(ours, expected, strict=True)]
    assert apart == [True, False, False, True, False, False, True]


# --- losses of ooDML -------------------------------------------------------------------------------------------------


@compared(
    "losses/multi_similarity",
    theirs="ooDML criteria/multisimilarity.py:115",
    verdict="deviates by choice",
    note="Equal unless a negative's similarity exceeds 0.9: then the anchor counts as one of its own positives there.",
)
def test_multi_similarity(agree_slopes):
    batch = make_batch(4, 0)
    loss = create("losses", "multi_similarity")
    agree_slopes(loss(batch.raw, batch.labels), theirs.multi_similarity(batch.unit, batch.labels), batch.raw)
    close = make_batch(4, 0, spread=0.1)
    with torch.no_grad():
        close.raw[close.labels == 1] = close.raw[close.labels == 0] + 0.05
    assert difference(loss(close.raw, close.labels), theirs.multi_similarity(close.unit, close.labels)) > 0.01


@compared(
    "losses/proxy_anchor",
    theirs="ooDML criteria/oproxy.py:114",
    verdict="deviates by choice",
    within=1e-8,
    note="Theirs weights a class of the first mean by its samples in the batch. Equal if all classes have equally many.",
)
def test_proxy_anchor(agree_slopes):
    batch = make_batch(4, 1)
    loss = create("losses", "proxy_anchor", num_classes=batch.classes, dim=batch.dim).double()
    loss.proxies.data = batch.proxies(batch.classes)
    agree_slopes(loss(batch.raw, batch.labels), theirs.proxy_anchor(batch.raw, batch.labels, loss.proxies), batch.raw, loss.proxies)
    uneven = torch.where(batch.labels == 1, 0, batch.labels)
    assert difference(loss(batch.raw, uneven), theirs.proxy_anchor(batch.raw, uneven, loss.proxies)) > 1e-3


@compared(
    "losses/margin",
    theirs="ooDML criteria/margin.py:72",
    verdict="equal with the option",
    flag="or_count=True",
    note="As in Revisiting, with the thresholds of the protocol: `beta=1.2`, and `beta=0.6` for R-margin.",
)
def test_margin(agree):
    for beta in (0.6, 1.2):
        batch = make_batch(2, 3)
        loss = create("losses", f"margin(or_count=True, beta={beta})", num_classes=batch.classes, miner=Given(batch.triplets)).double()
        ours = differentiate(loss(batch.raw, batch.labels), batch.raw, loss.beta)
        agree(ours, differentiate(margin(batch.unit, batch.labels, batch.triplets, loss.beta), batch.raw, loss.beta))
