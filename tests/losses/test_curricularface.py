import math

import pytest
import torch
from tests.losses.conftest import opposite_example

from unimetric.losses.curricularface import CurricularFace


def naive(z, y, proxies, t, margin, scale, per_class):
    """The loss of one step and the t after it."""
    labels, t = y.tolist(), list(t)
    cosine = [[float(x @ p / x.norm() / p.norm()) for p in proxies] for x in z]
    own = [row[label] for row, label in zip(cosine, labels, strict=True)]
    used = t
    if per_class:
        t = [
            0.99 * old + 0.01 * sum(s for s, label in zip(own, labels, strict=True) if label == c) / labels.count(c) if c in labels else old
            for c, old in enumerate(t)
        ]
    else:
        used = t = [0.99 * t[0] + 0.01 * sum(own) / len(own)]
    total = 0.0
    for row, label in zip(cosine, labels, strict=True):
        angle = math.acos(row[label])
        target = math.cos(angle + margin) if angle < math.pi - margin else row[label] - margin * math.sin(math.pi - margin)
        bound = target if per_class else math.cos(angle + margin)
        shift = used[label] if per_class else used[0]
        logits = [s * (shift + s) if s > bound else s for s in row]
        logits[label] = target
        total += math.log(sum(math.exp(scale * (v - target)) for v in logits))
    return total / len(labels), t


def build(proxies, **arguments):
    loss = CurricularFace(num_classes=6, dim=5, **arguments).double()
    loss.proxies.data = proxies.clone()
    return loss


@pytest.mark.parametrize("per_class", [False, True])
def test_is_its_equation_over_several_steps(per_class):
    z, y, proxies = opposite_example()
    loss = build(proxies, per_class_t=per_class, margin=0.3, scale=32)
    t = [0.0] * (6 if per_class else 1)
    for step in range(4):
        batch = z.roll(step, 1)
        expected, t = naive(batch, y, proxies, t, 0.3, 32, per_class)
        assert math.isclose(loss(batch, y).item(), expected, rel_tol=1e-9)
    assert torch.allclose(loss.t, torch.tensor(t, dtype=torch.float64), rtol=1e-9)


@pytest.mark.parametrize("per_class", [False, True])
def test_gradients(per_class):
    z, y, proxies = opposite_example()
    loss = build(proxies, per_class_t=per_class)
    loss(z, y)
    loss.eval()  # t would move between the evaluations of gradcheck
    assert torch.autograd.gradcheck(lambda z, _: loss(z, y), (z.requires_grad_(), loss.proxies))


@pytest.mark.parametrize("per_class", [False, True])
def test_t_lies_in_the_checkpoint_and_rests_in_evaluation(per_class):
    z, y, proxies = opposite_example()
    loss = build(proxies, per_class_t=per_class)
    loss(z, y).backward()
    resumed = build(proxies * 0, per_class_t=per_class)
    resumed.load_state_dict(loss.state_dict())
    assert loss.t.abs().max() > 0
    before = loss.t.clone()
    assert loss.eval()(z, y) == resumed.eval()(z, y)
    assert torch.equal(loss.t, before)
