"""The head and the objective next to the printed equations of CRT (Kan et al. 2022), and to the framework of its first author."""

from __future__ import annotations

import math

import torch

from unimetric.objectives import Output
from unimetric.objectives.crt import CRT
from unimetric.spec import create

from . import reference_crt as theirs
from .compared import compared, difference, differentiate
from .conftest import make_batch
from .reference_revisiting import multi_similarity

B, N, L, K, H, D = 6, 5, 8, 4, 10, 7


def head(text):
    torch.manual_seed(0)
    made = create("heads", text, features=L).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made, torch.randn(B, 1 + N, L).double()


def agree_on_branches(agree, made, tokens, expected):
    trained = list(made.parameters())
    for branch, other in zip(made.branches(tokens), expected, strict=True):
        mix = torch.randn(branch.shape, generator=torch.Generator().manual_seed(1)).double()
        agree(branch.detach(), other.detach())
        agree(differentiate((branch * mix).sum(), *trained), differentiate((other * mix).sum(), *trained))


@compared(
    "heads/crt",
    theirs="CRT eqs. 1 and 2",
    within=1e-10,
    note="Codes and embedding. The paper is not clear about the second branch; here it is the mean of the shared hidden layers.",
)
def test_head_shared(agree):
    made, tokens = head(f"crt(dim={D}, hidden={H}, prototypes={K})")
    coder = made.coder
    layers = [theirs.hidden(image[1:], coder.prototypes, coder.layers.weight, coder.layers.bias) for image in tokens]
    first = torch.stack([theirs.embedding(each, made.low.weight, made.low.bias) for each in layers])
    second = torch.stack([sum(each) / K for each in layers])
    agree_on_branches(agree, made, tokens, [first, second])


@compared(
    "heads/crt",
    theirs="CRT sec. 3.3",
    verdict="equal with the option",
    flag="shared=False",
    within=1e-10,
    note="Two separate transforms. The paper's experiments share all weights, as the default does.",
)
def test_head_separate(agree):
    made, tokens = head(f"crt(dim={D}, hidden={H}, prototypes={K}, low_prototypes=3, shared=False)")
    expected = []
    for coder, last in ((made.coder, made.low), (made.high_coder, made.high)):
        layers = [theirs.hidden(image[1:], coder.prototypes, coder.layers.weight, coder.layers.bias) for image in tokens]
        expected.append(torch.stack([theirs.embedding(each, last.weight, last.bias) for each in layers]))
    agree_on_branches(agree, made, tokens, expected)


def objective_terms(**arguments):
    made, tokens = head(f"crt(dim={D}, hidden={H}, prototypes={K}, low_prototypes=3, shared=False)")
    objective = CRT(num_classes=3, branches=(D, H), **arguments).double()
    objective.heads = [made]
    branches = tuple(x.detach().requires_grad_() for x in made.branches(tokens))
    images = torch.zeros(B, 3, 2, 2)
    return made, branches, objective(Output(branches[0], tokens, images, branches), torch.arange(B) // 2)


@compared(
    "objectives/crt",
    theirs="CRT eq. 5",
    verdict="equal with the option",
    flag="reduction='sum'",
    note="Consistency. At the printed weights the sum outweighs the loss by the batch size; the default is the mean over its entries.",
)
def test_consistency(agree):
    _, branches, terms = objective_terms(reduction="sum", consistency=0.9)
    expected = differentiate(0.9 * theirs.consistency(*branches), *branches)
    agree(differentiate(terms["consistency"], *branches), expected)
    _, branches, terms = objective_terms(consistency=0.9)
    agree(terms["consistency"].detach() * B * B, expected[0])


@compared("objectives/crt", theirs="CRT eq. 3", note="Diversity; added up over distinct sets of prototypes.")
def test_diversity(agree_slopes):
    made, _, terms = objective_terms()
    sets = list(made.prototype_sets)
    expected = sum(theirs.diversity(each) for each in sets)
    agree_slopes(terms["diversity"], expected, *sets)


@compared(
    "losses/multi_similarity",
    theirs="CBML (framework of CRT's first author)",
    verdict="equal with the option",
    flag="kept_only=False",
    note="Divided by the batch, as in the code of Wang et al. 2019; Revisiting and the default divide by the anchors that keep pairs.",
)
def test_multi_similarity(agree_slopes):
    batch = make_batch(4, 0, spread=0.7)
    loss = create("losses", "multi_similarity(kept_only=False)")
    expected = multi_similarity(batch.unit, batch.labels, kept_only=False)
    agree_slopes(loss(batch.raw, batch.labels), expected, batch.raw)
    assert difference(create("losses", "multi_similarity")(batch.raw, batch.labels), expected) > 0.01


@compared(
    "heads/crt",
    theirs="CBML (framework of CRT's first author)",
    verdict="equal with the option",
    flag="init='kaiming'",
    within=0.05,
    note="Head layers start normal with variance 2 / fan-out and zero bias. The default is torch's: prototypes start 14 times shorter.",
)
def test_initialization_crt(agree):
    torch.manual_seed(0)
    made = create("heads", "crt(dim=32, hidden=64, prototypes=48, init='kaiming')", features=96)
    for weight, fan_out in ((made.coder.prototypes, 48), (made.coder.layers.weight, 64), (made.low.weight, 32)):
        agree(weight.std(), math.sqrt(2 / fan_out))
        assert abs(float((weight / weight.std()).pow(4).mean()) - 3) < 0.3  # a normal distribution
    assert not made.coder.layers.bias.any() and not made.low.bias.any()


@compared(
    "heads/linear",
    theirs="CBML (framework of CRT's first author)",
    verdict="equal with the option",
    flag="init='kaiming'",
    within=0.05,
    note="As for the head `crt`.",
)
def test_initialization_linear(agree):
    torch.manual_seed(0)
    layer = create("heads", "linear(dim=64, init='kaiming')", features=128).layer
    agree(layer.weight.std(), math.sqrt(2 / 64))
    assert abs(float((layer.weight / layer.weight.std()).pow(4).mean()) - 3) < 0.3
    assert not layer.bias.any()
