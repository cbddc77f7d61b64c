"""Self-distillation: each term against plain loops in float64, and which way its gradient goes."""

import math

import pytest
import torch

from unimetric.errors import UnimetricError
from unimetric.objectives import Output
from unimetric.objectives.s2sd import S2SD, distillation
from unimetric.spec import create

DIM, FEATURES, BATCH = 5, 7, 8
LABELS = torch.arange(BATCH) // 2


def build(**arguments):
    torch.manual_seed(0)
    settings = {"loss": "multi_similarity", "dims": (6, 9), "delay": 0} | arguments
    return S2SD(num_classes=4, dim=DIM, features=FEATURES, **settings).double()


def output(seed=0):
    torch.manual_seed(seed)
    z, tokens = torch.randn(BATCH, DIM).double().requires_grad_(), torch.randn(BATCH, 4, FEATURES).double().requires_grad_()
    return Output(z, tokens, torch.zeros(BATCH, 3, 2, 2))


def cosine(a, b):
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def naive_kl(source, target, temperature):
    """T^2 / B sum_i sum_j p_ij log(p_ij / q_ij), p of the target, q of the source."""
    total = 0.0
    for i in range(len(source)):
        p = [math.exp(cosine(target[i], other) / temperature) for other in target]
        q = [math.exp(cosine(source[i], other) / temperature) for other in source]
        for mine, theirs in zip(p, q, strict=True):
            total += mine / sum(p) * math.log((mine / sum(p)) / (theirs / sum(q)))
    return temperature**2 * total / len(source)


@pytest.mark.parametrize("pool_aggr", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_every_term_is_its_equation(pool_aggr, temperature):
    objective = build(temperature=temperature, pool_aggr=pool_aggr, weight=3.0, feature_weight=2.0)
    given = output()
    terms = objective(given, LABELS)
    z, tokens = given.embeddings.detach(), given.tokens.detach()
    features = tokens[:, 0]
    if pool_aggr:
        features = torch.stack([tokens[i, 0] + torch.stack([tokens[i, 1:, k].max() for k in range(FEATURES)]) for i in range(BATCH)])
    branches = []
    for target in objective.targets:
        first, _, last = target
        hidden = (features @ first.weight.T + first.bias).clamp_min(0)
        branches.append((hidden @ last.weight.T + last.bias).detach())
    loss = create("losses", "multi_similarity")
    expected = {
        "loss": loss(z, LABELS).item() / 2,
        "targets": sum(loss(branch, LABELS).item() for branch in branches) / len(branches) / 2,
        "distillation": 3 * sum(naive_kl(z, branch, temperature) for branch in branches) / len(branches),
        "features": 2 * naive_kl(z, features, temperature),
    }
    assert terms.keys() == expected.keys()
    for key, value in expected.items():
        assert math.isclose(terms[key].item(), value, rel_tol=1e-9), key


def test_distillation_reaches_the_source_alone():
    """Spec section 14: the gradient of KL(target || source) goes into the source's similarities, none into the target's."""
    objective, given = build(), output()
    terms = objective(given, LABELS)
    (terms["distillation"] + terms["features"]).backward()
    assert given.embeddings.grad.abs().sum() > 0
    assert given.tokens.grad is None or not given.tokens.grad.any()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in objective.parameters())


def test_the_direction_of_the_divergence():
    """KL(target || source) has the gradient softmax(source) - softmax(target) in the source; the other way round has not."""
    torch.manual_seed(1)
    source, target = torch.randn(4, 4).double().requires_grad_(), torch.randn(4, 4).double()
    distillation(source, target[None], temperature=0.5)[0].backward()
    expected = 0.5 * ((source / 0.5).softmax(-1) - (target / 0.5).softmax(-1)) / 4
    torch.testing.assert_close(source.grad, expected.detach(), rtol=1e-9, atol=1e-12)


def test_the_branches_learn_from_their_own_losses_and_teach_the_backbone():
    objective, given = build(), output()
    objective(given, LABELS)["targets"].backward()
    assert given.tokens.grad[:, 0].abs().sum() > 0
    assert given.embeddings.grad is None
    assert all(parameter.grad.any() for parameter in objective.targets.parameters())


def test_each_branch_has_a_criterion_of_its_own():
    objective = build(loss="proxy_anchor")
    assert [tuple(loss.proxies.shape) for loss in (objective.loss, *objective.losses)] == [(4, 5), (4, 6), (4, 9)]
    margins = build(loss="margin")
    assert len({id(loss.beta) for loss in (margins.loss, *margins.losses)}) == 3


def test_features_wait_for_the_delay():
    objective, given = build(delay=2), output()
    values = [objective(given, LABELS)["features"].item() for _ in range(4)]
    assert values[0] == values[1] == 0
    assert values[2] == values[3] > 0
    resumed = build(delay=2)
    resumed.load_state_dict(objective.state_dict())
    assert resumed(given, LABELS)["features"].item() > 0


def test_without_feature_distillation_the_term_is_gone():
    assert "features" not in build(feature_weight=0.0)(output(), LABELS)


def test_no_target_branch_is_refused():
    with pytest.raises(UnimetricError, match="`dims` must be a list of length at least 1"):
        build(dims=())
