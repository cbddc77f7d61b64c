import math

import torch
from pytorch_metric_learning.losses import CircleLoss

from unimetric.geometry import unit
from unimetric.losses.circle import Circle


def test_equals_the_loop(case):
    terms = []
    for a in case.anchors:
        s = [(unit(case.embeddings[a]) @ unit(r)).item() for r in case.references]
        pull = sum(math.exp(-16 * max(0, 1.25 - s[p]) * (s[p] - 0.75)) for p in case.positives[a])
        push = sum(math.exp(16 * max(0, s[n] + 0.25) * (s[n] - 0.25)) for n in case.negatives[a])
        terms.append(math.log1p(pull * push))
    value = Circle(margin=0.25, scale=16.0)(case.embeddings, case.labels, case.memory).item()
    assert math.isclose(value, sum(terms) / len(terms), rel_tol=1e-9)


def test_gradient_holds_the_weights_still(case):
    """The weights have no gradient, so the numbers to compare with are those of the loss with its weights frozen where they are."""
    if case.memory is not None:
        return
    labels, here = case.labels, unit(case.embeddings.detach())
    same = labels[:, None] == labels[None, :]
    other = same & ~torch.eye(10, dtype=torch.bool)
    pull_weight, push_weight = (1.4 - here @ here.T).relu(), (here @ here.T + 0.4).relu()

    def frozen(z):
        s = unit(z) @ unit(z).T
        pull = torch.where(other, 4 * pull_weight * (0.6 - s), -torch.inf)[other.any(1)].logsumexp(1)
        push = torch.where(~same, 4 * push_weight * (s - 0.4), -torch.inf)[other.any(1)].logsumexp(1)
        return torch.log1p((pull + push).exp()).mean()

    assert torch.autograd.gradcheck(frozen, case.embeddings)
    ours = torch.autograd.grad(Circle(scale=4.0)(case.embeddings, labels), case.embeddings)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(frozen(case.embeddings), case.embeddings)[0], rtol=1e-9, atol=1e-12)


def test_equals_pytorch_metric_learning(case):
    if case.memory is None:
        peer = CircleLoss(m=0.4, gamma=80)(case.embeddings, case.labels)
        torch.testing.assert_close(Circle()(case.embeddings, case.labels), peer, rtol=1e-9, atol=0)
