"""The coded residual transform equals its equation, read literally, and never makes the tensor that the equation suggests."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unimetric.errors import UnimetricError
from unimetric.spec import create

BATCH, POSITIONS, CHANNELS = 3, 5, 4


def build(options: str = "", features: int = CHANNELS) -> torch.nn.Module:
    torch.manual_seed(0)
    small = "dim=3, hidden=6, prototypes=5, low_prototypes=2" + (f", {options}" if options else "")
    return create("heads", f"crt({small})", features=features).double()


def tokens(features: int = CHANNELS) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(BATCH, 1 + POSITIONS, features, dtype=torch.float64, requires_grad=True)


def literal(x, prototypes, first, first_bias, second=None, second_bias=None, divide=1.0, activated=True):
    """Equations 1 and 2, one picture, one prototype and one position after the other."""
    first, first_bias = (each.expand(len(prototypes), -1, -1) for each in (first, first_bias))  # where one network serves all
    second = second if second is None else second.expand(len(prototypes), -1, -1)
    rows = []
    for picture in x:
        total = 0.0
        for k, prototype in enumerate(prototypes):
            residual = torch.zeros_like(prototype)
            for position in picture:
                weight = torch.log(1 + torch.exp(torch.dot(position, prototype)))
                residual = residual + weight * (position - prototype)
            code = residual / divide @ first[k] + first_bias[k, 0]
            code = torch.nn.functional.gelu(code) if activated else code
            total = total + (code if second is None else code @ second[k] + second_bias)
        rows.append(total / len(prototypes))
    return torch.stack(rows)


def literal_branches(head, given, divide=1.0):
    x = head.reduce(given[:, 1:])
    coder, low = head.coder, head.low
    own = (x, coder.prototypes, coder.layers.weight, coder.layers.bias)
    first = literal(*own, low.weight, low.bias, divide=divide)
    if head.shared:
        return first, literal(*own, divide=divide, activated=head.activated)
    other, high = head.high_coder, head.high
    return first, literal(x, other.prototypes, other.layers.weight, other.layers.bias, high.weight, high.bias, divide=divide)


@pytest.mark.parametrize(
    "options",
    [
        "",
        "activated=True",
        "shared=False",
        "normalise_positions=True",
        "reduce=2",
        "init='orthogonal', shared=False",
        "separate=False",
        "separate=False, shared=False",
    ],
)
def test_equals_a_loop_over_prototypes_and_positions(options: str) -> None:
    head, given = build(options), tokens()
    divide = float(POSITIONS) if head.normalise_positions else 1.0
    learnt = [given, *head.parameters()]
    got, expected = head.branches(given), literal_branches(head, given, divide)
    probes = [torch.randn_like(branch) for branch in got]
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    slopes, expected_slopes = (
        torch.autograd.grad(sum((branch * probe).sum() for branch, probe in zip(branches, probes, strict=True)), learnt)
        for branches in (got, expected)
    )
    for ours, theirs in zip(slopes, expected_slopes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert (slopes[0][:, 0] == 0).all()  # the summary is not used
    torch.testing.assert_close(head(given), got[0])
    assert head.dim == 3
    assert head.dims == (3, 6) == tuple(branch.shape[1] for branch in got)


@pytest.mark.parametrize(("options", "alike"), [("", False), ("shared=False", False), ("activated=True", True)])
def test_pictures_are_not_all_alike_to_begin_with(options: str, alike: bool) -> None:
    """After the GELU the mean of many networks hardly depends on the picture, and the other branch would be pulled after it."""
    torch.manual_seed(0)
    head = create("heads", f"crt(dim=16, hidden=256, prototypes=64, {options})", features=64)
    given = torch.randn(12, 1, 64) + torch.randn(12, 1 + 49, 64)  # what all positions of a picture have in common, and what they have not
    for number, branch in enumerate(head.branches(given)):
        unit = torch.nn.functional.normalize(branch, dim=1)
        others = (unit @ unit.T)[~torch.eye(12, dtype=torch.bool)]
        assert (others.mean() > 0.95) == (alike and number == 1)


def test_the_order_of_positions_does_not_matter() -> None:
    head, given = build(), tokens()
    order = torch.tensor([0, 3, 1, 5, 2, 4])
    torch.testing.assert_close(head(given[:, order]), head(given))


def test_without_coding_it_is_two_linear_layers_on_the_summary() -> None:
    head, given = build("coded=False"), tokens()
    first, second = head.branches(given)
    torch.testing.assert_close(first, given[:, 0] @ head.low.weight.T + head.low.bias)
    torch.testing.assert_close(second, given[:, 0] @ head.high.weight.T + head.high.bias)
    assert head.prototype_sets == ()


@pytest.mark.parametrize("options", ["", "shared=False"])
def test_maps_are_the_weights_of_the_equation(options: str) -> None:
    head, given = build(options), tokens()
    maps = head.maps(given)
    sets = torch.cat(head.prototype_sets)
    assert maps.shape == (BATCH, len(sets), POSITIONS)
    assert len(sets) == (7 if options else 5)
    for k in range(len(sets)):
        for j in range(POSITIONS):
            torch.testing.assert_close(maps[:, k, j], torch.log1p(torch.exp(given[:, 1 + j] @ sets[k])))


@pytest.mark.parametrize(
    ("options", "features", "count"),
    [
        ("", 512, 64 * 512 + 64 * (512 * 1024 + 1024) + 64 * 1024 * 128 + 128),
        (
            "shared=False",
            512,
            (49 + 64) * (512 + 512 * 1024 + 1024) + 49 * 1024 * 128 + 128 + 64 * 1024 * 1024 + 1024,
        ),
        ("reduce=512", 2048, 2048 * 512 + 512 + 64 * 512 + 64 * (512 * 1024 + 1024) + 64 * 1024 * 128 + 128),
    ],
)
def test_has_the_parameters_of_the_paper(options: str, features: int, count: int) -> None:
    with torch.device("meta"):  # counted, not filled
        head = create("heads", f"crt({options})", features=features)
    assert sum(parameter.numel() for parameter in head.parameters()) == count
    assert head.dims == (128, 1024)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes, forwards or backwards."""

    seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.seen = max(self.seen, leaf.numel())
        return result


@pytest.mark.parametrize("shared", [True, False])
def test_never_makes_the_tensor_of_residuals(shared: bool) -> None:
    batch, count, positions, channels = 4, 16, 32, 24
    head = create("heads", f"crt(dim=4, hidden=8, prototypes={count}, low_prototypes={count}, shared={shared})", features=channels)
    given = torch.randn(batch, 1 + positions, channels, requires_grad=True)
    with Largest() as largest:
        sum(branch.square().sum() for branch in head.branches(given)).backward()
    sizes = {"tokens": batch * (1 + positions) * channels, "weights": count * channels * 8, "residuals": batch * count * channels}
    assert largest.seen == max(sizes.values())
    assert largest.seen < batch * count * positions * channels / 8


def test_prototypes_can_start_as_unlike_as_can_be() -> None:
    (prototypes,) = build("init='orthogonal'", features=16).prototype_sets
    gram = prototypes @ prototypes.T
    torch.testing.assert_close(gram, torch.eye(5, dtype=torch.float64) / 3, rtol=0, atol=1e-6)


def test_keeps_its_parameters_in_float32_under_autocast_and_stays_near() -> None:
    head, given = build().float(), tokens().detach().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = head.branches(given)
    for ours, full in zip(half, head.branches(given), strict=True):
        torch.testing.assert_close(ours.float(), full, rtol=0.05, atol=0.05)
    half[0].float().sum().backward()
    assert all(parameter.dtype == torch.float32 for parameter in head.parameters())
    assert all(parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all() for parameter in head.parameters())


def test_captures_as_one_graph() -> None:
    head, given = build().float(), tokens().detach().float()
    torch._dynamo.reset()
    got = torch.compile(head.branches, fullgraph=True, backend="aot_eager")(given)
    for ours, eager in zip(got, head.branches(given), strict=True):
        torch.testing.assert_close(ours, eager)


def test_says_what_it_needs() -> None:
    with pytest.raises(UnimetricError, match="summary alone"):
        build()(tokens()[:, :1])
    with pytest.raises(UnimetricError, match="cannot be 'spread'"):
        build("init='spread'")
    with pytest.raises(UnimetricError, match="at least one prototype"):
        create("heads", "crt(prototypes=0)", features=4)
