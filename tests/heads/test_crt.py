"""The coded residual transform equals its equation, read literally, and never makes the tensor that the equation suggests."""

from __future__ import annotations

import re

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


def literal(x, prototypes, first, first_bias, second=None, second_bias=None, divide=1.0, activated=True, subtract=1.0):
    """Equations 1 and 2 as loops over images, prototypes and positions."""
    first, first_bias = (each.expand(len(prototypes), -1, -1) for each in (first, first_bias))  # where one network serves all
    second = second if second is None else second.expand(len(prototypes), -1, -1)
    rows = []
    for image in x:
        total = 0.0
        for k, prototype in enumerate(prototypes):
            residual = torch.zeros_like(prototype)
            for position in image:
                weight = torch.log(1 + torch.exp(torch.dot(position, prototype)))
                residual = residual + weight * (position - subtract * prototype)
            code = residual / divide @ first[k] + first_bias[k, 0]
            code = torch.nn.functional.gelu(code) if activated else code
            total = total + (code if second is None else code @ second[k] + second_bias)
        rows.append(total / len(prototypes))
    return torch.stack(rows)


def literal_branches(head, given, divide=1.0, subtract=1.0):
    x = head.reduce(given if head.class_token else given[:, 1:])
    coder, low = head.coder, head.low
    own = (x, coder.prototypes, coder.layers.weight, coder.layers.bias)
    options = {"divide": divide, "subtract": subtract}
    if head.nested:
        trunk = literal(*own, head.high.weight, head.high.bias, **options)
        return trunk @ low.weight.T + low.bias, trunk
    first = literal(*own, low.weight, low.bias, **options)
    if head.shared:
        return first, literal(*own, activated=head.activated, **options)
    other, high = head.high_coder, head.high
    return first, literal(x, other.prototypes, other.layers.weight, other.layers.bias, high.weight, high.bias, **options)


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
        "init='kaiming'",
        "init='kaiming', shared=False, reduce=2",
        "residual=False",
        "residual=False, shared=False, normalise_positions=True",
        "prototype_std=1.5",
        "nested=True",
        "nested=True, separate=False, class_token=True",
        "class_token=True, shared=False",
    ],
)
def test_equals_a_loop_over_prototypes_and_positions(options: str) -> None:
    head, given = build(options), tokens()
    divide = float(POSITIONS) if head.normalise_positions else 1.0
    subtract = 0.0 if "residual=False" in options else 1.0
    learnt = [given, *head.parameters()]
    got, expected = head.branches(given), literal_branches(head, given, divide, subtract)
    probes = [torch.randn_like(branch) for branch in got]
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    slopes, expected_slopes = (
        torch.autograd.grad(sum((branch * probe).sum() for branch, probe in zip(branches, probes, strict=True)), learnt)
        for branches in (got, expected)
    )
    for ours, theirs in zip(slopes, expected_slopes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert (slopes[0][:, 0] == 0).all() != head.class_token  # the global token is used only if it is coded
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


@pytest.mark.parametrize("pool", ["", "summary", "mean", "max"])
def test_uncoded_branches_are_linear_in_the_pooled_tokens(pool: str) -> None:
    head, given = build("coded=False" + (f", pool='{pool}'" if pool else "")), tokens()
    pooled = {"mean": given[:, 1:].sum(1) / POSITIONS, "max": given[:, 1:].max(1).values}.get(pool, given[:, 0])
    first, second = head.branches(given)
    torch.testing.assert_close(first, pooled @ head.low.weight.T + head.low.bias, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(second, pooled @ head.high.weight.T + head.high.bias, rtol=1e-12, atol=1e-12)
    assert head.prototype_sets == ()


@pytest.mark.parametrize("name", ["small(channels=16)", "timm(name='test_vit', image_size=32)"])
def test_uncoded_default_pools_the_mean_without_a_class_token(name: str) -> None:
    """The global token of a backbone without a class token is the mean over its positions; of a transformer it is not."""
    backbone = create("backbones", name).eval()
    with torch.no_grad():
        given = backbone(torch.randn(2, 3, 32, 32))
        default, mean = (build(f"coded=False{pool}", backbone.channels).float()(given) for pool in ("", ", pool='mean'"))
    assert torch.allclose(default, mean, atol=1e-6) == name.startswith("small")


def test_default_initial_weights_are_unchanged() -> None:
    """The draws of earlier versions, in order: prototypes, first layers and their biases, second layers."""
    torch.manual_seed(0)
    head = create("heads", "crt(dim=3, hidden=6, prototypes=5)", features=CHANNELS)
    torch.manual_seed(0)
    bound = CHANNELS**-0.5
    assert torch.equal(head.coder.prototypes, torch.empty(5, CHANNELS).uniform_(-bound, bound))
    assert torch.equal(head.coder.layers.weight, torch.empty(5, CHANNELS, 6).uniform_(-bound, bound))
    assert torch.equal(head.coder.layers.bias, torch.empty(5, 1, 6).uniform_(-bound, bound))
    assert torch.equal(head.low.weight, torch.empty(5, 6, 3).uniform_(-(6**-0.5), 6**-0.5))
    assert torch.equal(head.low.bias, torch.zeros(3))
    for older in ("init='torch'", "init='linear'"):
        torch.manual_seed(0)
        same = create("heads", f"crt(dim=3, hidden=6, prototypes=5, {older})", features=CHANNELS)
        assert all(torch.equal(one, other) for one, other in zip(head.parameters(), same.parameters(), strict=True))


def check_normal(values: torch.Tensor, std: float) -> None:
    """Mean and standard deviation within five standard errors, and the kurtosis of a normal distribution (1.8 if uniform)."""
    values = values.detach().double().flatten()
    count = len(values)
    assert abs(values.mean()) < 5 * std / count**0.5
    assert values.std().item() == pytest.approx(std, rel=5 / (2 * count) ** 0.5)
    assert (values / std).pow(4).mean().item() == pytest.approx(3, abs=5 * (96 / count) ** 0.5)


def test_kaiming_init_has_the_variance_of_the_fan_out() -> None:
    torch.manual_seed(0)
    head = create("heads", "crt(dim=8, hidden=50, prototypes=32, low_prototypes=16, reduce=64, shared=False, init='kaiming')", features=96)
    check_normal(head.reduce.weight, (2 / 64) ** 0.5)
    check_normal(head.coder.prototypes, (2 / 16) ** 0.5)
    check_normal(head.high_coder.prototypes, (2 / 32) ** 0.5)
    for layers, outputs in ((head.coder.layers, 50), (head.high_coder.layers, 50), (head.low, 8), (head.high, 50)):
        check_normal(layers.weight, (2 / outputs) ** 0.5)
    biases = [value for name, value in head.named_parameters() if name.endswith("bias")]
    assert len(biases) == 5
    assert all((bias == 0).all() for bias in biases)
    torch.manual_seed(0)
    plain = create("heads", "crt(dim=40, hidden=60, coded=False, init='kaiming')", features=96)
    check_normal(plain.low.weight, (2 / 40) ** 0.5)
    check_normal(plain.high.weight, (2 / 60) ** 0.5)
    assert (plain.low.bias == 0).all() and (plain.high.bias == 0).all()


def test_prototype_std_sets_the_prototypes_alone() -> None:
    for init in ("torch", "kaiming"):
        torch.manual_seed(0)
        head = create("heads", f"crt(dim=4, hidden=8, prototypes=48, init='{init}', prototype_std=0.7)", features=200)
        check_normal(head.coder.prototypes, 0.7)
        std = (2 / 8) ** 0.5 if init == "kaiming" else 200**-0.5 / 3**0.5
        assert head.coder.layers.weight.std().item() == pytest.approx(std, rel=0.02)


def test_kaiming_init_spreads_the_codes() -> None:
    """Prototypes 14 times as long as by default for 2,048 channels, and codes of an image that differ more."""
    lengths, cosines = {}, {}
    for init in ("torch", "kaiming"):
        torch.manual_seed(0)
        head = create("heads", f"crt(dim=1, hidden=1, init='{init}')", features=2048)
        lengths[init] = head.coder.prototypes.norm(dim=1).mean().item()
        x = torch.relu(torch.randn(49, 2048))  # features after a ReLU, as those of a ResNet
        with torch.no_grad():
            weights = torch.nn.functional.softplus(x @ head.coder.prototypes.T)
            codes = torch.nn.functional.normalize(weights.T @ x - weights.sum(0)[:, None] * head.coder.prototypes, dim=1)
        cosines[init] = ((codes @ codes.T).sum() - 64) / (64 * 63)
    assert lengths["kaiming"] / lengths["torch"] == pytest.approx((2 / 64) ** 0.5 * (3 * 2048) ** 0.5, rel=0.01)
    assert cosines["torch"] > 0.95 > 0.85 > cosines["kaiming"]


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
def test_parameters_follow_from_the_widths(options: str, features: int, count: int) -> None:
    """The paper prints no number of parameters: prototypes, K layers L to 1024 with bias, and K layers 1024 to 128 with one bias."""
    with torch.device("meta"):  # counted, not filled
        head = create("heads", f"crt({options})", features=features)
    assert sum(parameter.numel() for parameter in head.parameters()) == count
    assert head.dims == (128, 1024)


@pytest.mark.parametrize("shared", [True, False])
def test_prototypes_have_their_own_learning_rate(shared: bool) -> None:
    own, usual = build(f"shared={shared}, prototype_lr=0.3").groups(0.1), build(f"shared={shared}").groups(0.1)
    assert [(group["name"], group["lr"]) for group in own] == [("head", 0.1), ("prototypes", 0.3)]
    assert [tuple(weight.shape) for weight in own[1]["params"]] == ([(5, 4)] if shared else [(2, 4), (5, 4)])
    assert len(usual) == 1 and len(usual[0]["params"]) == len(own[0]["params"]) + len(own[1]["params"])


def test_class_token_is_coded_and_not_drawn() -> None:
    head, given = build("class_token=True"), tokens()
    assert head.maps(given).shape == (BATCH, 5, POSITIONS)
    torch.testing.assert_close(head.maps(given), build().maps(given))
    assert not torch.allclose(head(given), build()(given))


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
    with pytest.raises(UnimetricError, match="`crt` requires spatial positions"):
        build()(tokens()[:, :1])
    with pytest.raises(UnimetricError, match="requires spatial positions"):
        build("coded=False, pool='mean'")(tokens()[:, :1])
    assert build("coded=False")(tokens()[:, :1]).shape == (BATCH, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("init='spread'", "`init` must be one of `torch`, `kaiming`, `orthogonal`, `linear`, got 'spread'"),
        ("pool='min', coded=False", "`pool` must be one of `summary`, `mean`, `max`, got 'min'"),
        ("pool='mean'", "`pool='mean'` requires `coded=False`"),
        ("nested=True, shared=False", "`nested=True` requires `shared=True` and `activated=False`"),
        ("class_token=True, coded=False", "`nested`, `class_token` and `prototype_lr` require `coded=True`"),
        ("prototypes=0", "`prototypes` must be at least 1, got 0"),
        ("low_prototypes=-1", "`low_prototypes` must be at least 1, got -1"),
        ("prototype_std=0.0", "`prototype_std` must be above 0 or None, got 0.0"),
        ("prototype_std=1.0, init='orthogonal'", "`prototype_std` requires an `init` other than `orthogonal`"),
    ],
)
def test_rejects_invalid_arguments(options: str, message: str) -> None:
    with pytest.raises(UnimetricError, match=re.escape(message)) as error:
        create("heads", f"crt({options})", features=4)
    assert error.value.hint
