"""Manifold mixup: what is blended where, with which weights, and what the losses make of two labels."""

import math

import pytest
import torch
from torch import nn

from unimetric.errors import UnimetricError
from unimetric.objectives import Output
from unimetric.objectives.mixup import Mixup
from unimetric.runs.model import Model
from unimetric.spec import create

BATCH, DIM = 8, 5
LABELS = torch.arange(BATCH) // 2


def build(**arguments):
    torch.manual_seed(0)
    return Mixup(**{"loss": "multi_similarity", "num_classes": 4, "dim": DIM, "batch_size": BATCH} | arguments)


def model(backbone="small(channels=16)"):
    torch.manual_seed(1)
    built = create("backbones", backbone)
    return Model(built, create("heads", f"linear(dim={DIM})", features=built.channels))


def output(z):
    return Output(z, z[:, None], torch.zeros(len(z), 3, 2, 2))


def put(objective, stage, lam, order):
    """As if these had been drawn."""
    objective.blends.fill_(1)[stage] = lam
    objective.scores[torch.tensor(order)] = torch.arange(len(order)).to(objective.scores) / len(order)


def test_draws():
    """One stage at a time, evenly; lam as Beta(2, 2), whose mean is 1/2 and variance 1/20; every permutation is one."""
    objective = build()
    stages, lams = [], []
    for _ in range(800):
        objective.begin()
        drawn = (objective.blends < 1).nonzero()[:, 0].tolist()
        assert len(drawn) == 1
        stages += drawn
        lams.append(objective.blends.min())
        assert sorted(objective.partners(BATCH).tolist()) == list(range(BATCH))
    assert max(abs(stages.count(stage) / 800 - 0.25) for stage in range(4)) < 0.05
    lams = torch.stack(lams).double()
    assert lams.mean().item() == pytest.approx(0.5, abs=0.03)
    assert lams.var().item() == pytest.approx(0.05, rel=0.15)
    assert objective.quantiles.double().var().item() == pytest.approx(0.05, rel=1e-3)
    assert Mixup(alpha=0.4, num_classes=4, dim=DIM, batch_size=2).quantiles.double().var().item() == pytest.approx(1 / 7.2, rel=1e-2)


def test_soft_labels_of_a_classification_loss():
    """Weighted twice over equals the cross-entropy with the blended label, sample by sample."""
    objective = build(loss="normalized_softmax").double()
    order = [3, 0, 1, 2, 7, 6, 5, 4]
    put(objective, 2, 0.3, order)
    z = torch.randn(BATCH, DIM, generator=torch.manual_seed(2)).double()
    terms = objective(output(z), LABELS)
    proxies, total = objective.loss.proxies.detach(), 0.0
    for i in range(BATCH):
        logits = [float(z[i] @ p / z[i].norm() / p.norm()) / 0.05 for p in proxies]
        soft = [0.3 * int(LABELS[i] == c) + 0.7 * int(LABELS[order[i]] == c) for c in range(4)]
        total -= sum(weight * (x - math.log(sum(map(math.exp, logits)))) for weight, x in zip(soft, logits, strict=True))
    lam = objective.blends[2].item()
    assert lam == 0.3
    assert math.isclose(sum(terms.values()).item(), total / BATCH, rel_tol=1e-9)


def test_two_entries_of_a_ranking_loss():
    """Equation 30 by loops: each entry's triplets, with that entry's weight; where both labels agree the weights add up to 1."""
    objective = build(loss="triplet(squared=False)", miner="all").double()
    order = [1, 0, 4, 3, 2, 7, 6, 5]
    put(objective, 0, 0.6, order)
    z = torch.randn(BATCH, DIM, generator=torch.manual_seed(3)).double()
    terms = objective(output(z), LABELS)

    def ranking(labels):
        units, hinges = z / z.norm(dim=1, keepdim=True), []
        for a in range(BATCH):
            for p in range(BATCH):
                for n in range(BATCH):
                    if a != p and labels[a] == labels[p] != labels[n]:
                        near, far = (math.sqrt(2 - 2 * float(units[a] @ units[x]) + 1e-8) for x in (p, n))
                        hinges.append(max(0.0, near - far + 0.2))
        return sum(hinges) / len(hinges)

    mixed = [LABELS[i] for i in order]
    assert math.isclose(terms["loss"].item(), 0.6 * ranking(LABELS), rel_tol=1e-9)
    assert math.isclose(terms["partner"].item(), 0.4 * ranking(mixed), rel_tol=1e-9)
    put(objective, 0, 0.6, [1, 0, 3, 2, 5, 4, 7, 6])  # every partner of the same class
    assert math.isclose(sum(objective(output(z), LABELS).values()).item(), ranking(LABELS), rel_tol=1e-9)


@pytest.mark.parametrize("backbone", ["small(channels=16)", "timm(name='test_resnet')", "timm(name='test_vit', image_size=32)"])
def test_each_stage_is_blended_by_itself(backbone):
    """Watched from behind the hooks: what enters a stage is blended there if its turn has come, and as it was otherwise."""
    plain, mixed = model(backbone).train(), model(backbone).train()
    network = getattr(mixed.backbone, "network", mixed.backbone)
    plain_network = getattr(plain.backbone, "network", plain.backbone)
    if hasattr(network, "layer1"):
        places = [(net.layer1, net.layer2, net.layer3) for net in (plain_network, network)]
    else:
        sequences = [getattr(net, "blocks", None) or net.layers for net in (plain_network, network)]
        places = [tuple(sequence[len(sequence) * k // 4] for k in (1, 2, 3)) for sequence in sequences]
    objective = build()
    objective.meet(mixed)
    seen: list[dict[int, torch.Tensor]] = [{}, {}]
    for net, stages in enumerate(([plain.backbone, *places[0]], [mixed.backbone, *places[1]])):
        for number, stage in enumerate(stages):
            stage.register_forward_pre_hook(lambda _, inputs, net=net, number=number: seen[net].update({number: inputs[0]}))
    images = torch.randn(BATCH, 3, 32, 32, generator=torch.manual_seed(4))
    order = [3, 0, 1, 2, 7, 6, 5, 4]
    for stage in range(4):
        put(objective, stage, 0.25, order)
        plain(images)
        mixed(images)
        for before in range(stage):
            assert torch.equal(seen[1][before], seen[0][before])
        expected = 0.25 * seen[0][stage] + 0.75 * seen[0][stage][order]
        torch.testing.assert_close(seen[1][stage], expected)
        assert not torch.equal(seen[1][stage], seen[0][stage])


def test_nothing_is_blended_at_test_time_and_the_model_is_the_plain_one():
    plain, mixed = model(), model()
    objective = build()
    objective.meet(mixed)
    objective.begin()
    images = torch.randn(BATCH, 3, 32, 32)
    for one in (plain, mixed):
        one.eval()
    assert torch.equal(plain(images)[0], mixed(images)[0])
    assert plain.state_dict().keys() == mixed.state_dict().keys()
    assert mixed(images)[0].shape == (BATCH, DIM)


def test_a_compiled_model_blends_with_what_is_drawn_anew():
    mixed = model().train()
    objective = build()
    objective.meet(mixed)
    torch._dynamo.reset()
    compiled = torch.compile(mixed, fullgraph=True, backend="aot_eager", dynamic=False)
    images = torch.randn(BATCH, 3, 32, 32)
    answers = []
    for _ in range(3):
        objective.begin()
        answers.append(compiled(images)[0].detach())
        torch.testing.assert_close(answers[-1], mixed(images)[0].detach(), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(answers[0], answers[1])


def test_each_device_blends_its_own_share():
    """Two devices with half of the batch each: partners stay within the half, and are the same in both."""
    objective = build(loss="normalized_softmax")
    objective.begin()
    objective.share = BATCH // 2
    order = objective.partners(BATCH // 2).tolist()
    assert sorted(order) == list(range(BATCH // 2))
    partners = LABELS[[*order, *(BATCH // 2 + row for row in order)]]
    z, lam = torch.randn(BATCH, DIM), objective.blends.min().item()
    expected = (1 - lam) * objective.loss(z, partners).item()
    assert objective(output(z), LABELS)["partner"].item() == pytest.approx(expected, rel=1e-6)


def test_a_backbone_without_stages():
    class Odd(nn.Module):
        channels, mean, std = 3, (0.5,) * 3, (0.5,) * 3

        def forward(self, images):
            return images.mean((2, 3))[:, None]

    odd = Model(Odd(), create("heads", f"linear(dim={DIM})", features=3)).train()
    with pytest.raises(UnimetricError, match="requires a backbone with stages, but Odd has none"):
        build().meet(odd)
    objective = build(stages=(0,))
    objective.meet(odd)
    objective.begin()
    images = torch.randn(BATCH, 3, 4, 4)
    lam = objective.blends[0]
    expected = odd.head(odd.backbone.forward(lam * images + (1 - lam) * images[objective.partners(BATCH)]))
    torch.testing.assert_close(odd(images)[0], expected)


@pytest.mark.parametrize("arguments", [{"stages": (4,)}, {"stages": ()}, {"alpha": 0.0}])
def test_what_cannot_be_is_refused(arguments):
    with pytest.raises(UnimetricError):
        build(**arguments)
