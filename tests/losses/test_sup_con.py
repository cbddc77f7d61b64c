import math

import pytest
import torch
from pytorch_metric_learning.losses import SupConLoss

from unimetric.geometry import unit
from unimetric.losses.sup_con import SupCon


def similarity(case, a, j, temperature):
    return (unit(case.embeddings[a]) @ unit(case.references[j])).item() / temperature


def test_equals_the_loop(case):
    terms = []
    for a in case.anchors:
        s = {j: similarity(case, a, j, 0.2) for j in case.positives[a] + case.negatives[a]}
        everyone = math.log(sum(map(math.exp, s.values())))
        terms.append(sum(everyone - s[p] for p in case.positives[a]) / len(case.positives[a]))
    value = SupCon(temperature=0.2)(case.embeddings, case.labels, case.memory).item()
    assert math.isclose(value, sum(terms) / len(terms), rel_tol=1e-9)


def test_pairwise_equals_the_loop(case):
    def view(j):
        valid = range(len(case.names)) if case.memory is None else case.memory.valid.nonzero().flatten().tolist()
        return sum(1 for k in valid if k < j and case.names[k] == case.names[j])

    total, divisor = 0.0, 0
    for a in range(10):
        divisor += len(case.positives[a]) + 1
        for p in case.positives[a]:
            views = {view(p), view(case.own[a])}
            rivals = sum(math.exp(similarity(case, a, n, 0.2)) for n in case.negatives[a] if view(n) in views)
            own = math.exp(similarity(case, a, p, 0.2))
            total -= math.log(own / (own + rivals))
    value = SupCon(temperature=0.2, pairwise=True)(case.embeddings, case.labels, case.memory).item()
    assert math.isclose(value, total / divisor, rel_tol=1e-9)


def test_pairwise_equals_the_batch_of_views_of_hyp():
    """The released code: a batch of (classes, views), cross entropy over the stacked logits of two views, averaged over views squared."""
    torch.manual_seed(0)
    classes, views = 5, 3
    z = unit(torch.randn(classes, views, 8, dtype=torch.float64))
    target, total = torch.arange(classes), 0.0
    for i in range(views):
        for j in range(views):
            if i != j:
                across, within = z[:, i] @ z[:, j].T / 0.1, z[:, i] @ z[:, i].T / 0.1
                logits = torch.cat([across, within - 1e9 * torch.eye(classes)], 1)
                total += torch.nn.functional.cross_entropy(logits, target).item() / views**2
    labels = target.repeat_interleave(views)
    assert math.isclose(SupCon(pairwise=True)(z.flatten(0, 1), labels).item(), total, rel_tol=1e-9)


@pytest.mark.parametrize("pairwise", [False, True])
def test_gradient(case, pairwise):
    loss = SupCon(pairwise=pairwise)
    assert torch.autograd.gradcheck(lambda z: loss(z, case.labels, case.memory), case.embeddings)


def test_equals_pytorch_metric_learning(case):
    if case.memory is None:
        peer = SupConLoss(temperature=0.1)(case.embeddings, case.labels)
        torch.testing.assert_close(SupCon()(case.embeddings, case.labels), peer, rtol=1e-9, atol=0)


def test_forms_agree_on_two_samples_a_class_up_to_the_divisor():
    torch.manual_seed(0)
    embeddings, labels = torch.randn(12, 6, dtype=torch.float64), torch.arange(6).repeat(2)
    torch.testing.assert_close(SupCon(pairwise=True)(embeddings, labels) * 2, SupCon()(embeddings, labels), rtol=1e-9, atol=0)


@pytest.mark.parametrize("pairwise", [False, True])
def test_a_cold_temperature_stays_finite(pairwise):
    torch.manual_seed(0)
    embeddings = torch.randn(12, 6).requires_grad_()
    loss = SupCon(temperature=0.002, pairwise=pairwise)(embeddings, torch.arange(4).repeat(3))
    loss.backward()
    assert loss.isfinite()
    assert embeddings.grad.isfinite().all()
