import copy

import pytest
import torch

from unimetric.errors import UnimetricError
from unimetric.spec import create


def images():
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def learning(module):
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("after", "first"), [("quarter", "network.layer2."), ("half", "network.layer3."), ("three_quarters", "network.layer4.")]
)
def test_layers_after_the_depth_learn(after, first):
    plain = create("backbones", "timm(name='resnet18')")
    order = [name for name, _ in plain.named_parameters()]
    start = next(number for number, name in enumerate(order) if name.startswith(first))
    adapted = create("adapters", f"last_layers(after='{after}')", backbone=plain)
    assert learning(adapted.merged()) == set(order[start:])


@pytest.mark.parametrize("text", ["timm(name='resnet18')", "timm(name='test_vit', image_size=32)", "efficientnet_lite(pretrained=False)"])
def test_a_step_changes_nothing_that_is_frozen(text):
    plain = create("backbones", text)
    before = copy.deepcopy(plain.state_dict())
    expected = plain.eval()(images())
    adapted = create("adapters", "last_layers", backbone=plain)
    assert torch.equal(adapted.eval()(images()), expected)
    adapted.train()
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    adapted(images())[:, 0].square().sum().backward()
    torch.optim.SGD(trained, lr=0.1).step()
    changed = {name for name, value in plain.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and changed <= learning(plain)  # no statistics, which a run does not save


def test_backbone_without_blocks_is_rejected():
    plain = create("backbones", "small(channels=8)")
    plain.find_stages = lambda: ()
    with pytest.raises(UnimetricError, match="no sequence of blocks"):
        create("adapters", "last_layers", backbone=plain)
