"""What every adapter promises: it starts as nothing, learns alone, keeps little; and the counts of the papers."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from unimetric.adapters._vit import normalize, run_block
from unimetric.errors import UnimetricError
from unimetric.spec import bind, create, names

SILENT = ["linear_probe", "stochastic_adapter", "stochastic_adapter(keep=1.0)", "lora", "lora(targets='qv', keep=0.5)", "adaptformer"]
LOUD = [
    "prompt_pool",
    "puma",
    "puma(pool='tokens', keep=1.0)",
    "puma(lora_rank=4, lora_keep=0.5)",
    "vpt",
    "vpt(placed=True)",
    "vpt(deep=True)",
]


def network(name="test_vit", image_size=32, seed=0):
    """A transformer of timm as if it were trained: no norm has a scale of one and a shift of zero. At most six blocks, for speed."""
    with torch.device("meta"):
        made = create("backbones", f"timm(name='{name}', image_size={image_size})")
    made.network.blocks = made.network.blocks[:6]
    made.to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.1)
        for module in made.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.add_(1)
    return made


def adapt(text, backbone):
    part, arguments = bind("adapters", text)
    torch.manual_seed(1)
    return part(backbone, **arguments)


def stir(module, seed=2):
    """Give everything that learns another value, as training would."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return module


def pictures(count=3, size=32, dtype=torch.float32):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(3)).to(dtype)


def trained(module):
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


HEAD = 384 * 128 + 128


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("puma", 2_485_376),
        ("puma(lora_rank=128)", 4_844_672),
        ("prompt_pool", 126_080),
        ("prompt_pool(prompts=1)", 53_120),
        ("vpt", 52_352),
        ("puma(pool='tokens', keep=1.0)", 2_411_648),
        ("stochastic_adapter", 2_408_576),
        ("lora", 2_408_576),
        ("adaptformer", 2_416_256),
        ("linear_probe", HEAD),
    ],
)
def test_as_many_parameters_learn_as_in_the_paper(text, count):
    """Table 3 of PUMA, on ViT-S/16 with a head of 128 dimensions."""
    with torch.device("meta"):  # where parameters are counted, not stored
        assert trained(adapt(text, create("backbones", "timm(name='vit_small_patch16_224')"))) + HEAD == count


def test_mlp_3_has_as_many_parameters_as_in_the_paper():
    assert trained(create("heads", "mlp(dim=128)", features=384)) == 5_247_104


@pytest.mark.parametrize("name", ["test_vit", "test_vit2", "deit_tiny_patch16_224", "vit_small_patch14_dinov2"])
def test_what_starts_at_zero_changes_nothing(name):
    """To the last bit, also with LayerScale, another patch size, and a position embedding of its own."""
    size = 56 if "dinov2" in name else 32
    plain = network(name, size).eval()
    expected = plain(pictures(2, size))
    for text in SILENT if name == "test_vit" else ["stochastic_adapter", "lora"]:
        assert torch.equal(adapt(text, copy.deepcopy(plain)).eval()(pictures(2, size)), expected), text


def test_layer_scale_scales_a_branch_or_leaves_it_alone():
    """z + LS(MSA + A) or z + LS(MSA) + A, and the same with the MLP, in one block of DINOv2."""
    block = network("vit_small_patch14_dinov2", 56).network.blocks[0].double().eval()
    branches = [stir(adapt("stochastic_adapter(keep=1.0)", network("vit_small_patch14_dinov2", 56))) for _ in range(2)]
    first, second = branches[0].attention[0].double(), branches[1].mlp[0].double()
    for number, scale in enumerate((block.ls1, block.ls2)):
        scale.gamma.data = torch.linspace(0.1, 3 + number, len(scale.gamma), dtype=torch.float64)
    z = torch.randn(2, 5, 384, dtype=torch.float64)

    def adapter(branch, x):
        return branch.scale * torch.relu(x @ branch.down) @ branch.up

    for scaled in (False, True):
        expected = z
        for norm, own, gamma, branch in (
            (block.norm1, block.attn, block.ls1.gamma, first),
            (block.norm2, block.mlp, block.ls2.gamma, second),
        ):
            x = norm(expected)
            expected = expected + gamma * own(x) + (gamma if scaled else 1) * adapter(branch, x)
        torch.testing.assert_close(run_block(block, z, first, second, scaled=scaled), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("text", LOUD)
def test_prompts_change_the_summary_and_not_the_shape(text):
    plain = network().eval()
    changed = adapt(text, copy.deepcopy(plain)).eval()(pictures())
    expected = plain(pictures())
    assert changed.shape == expected.shape
    assert (changed - expected).abs().max() > 1e-4


@pytest.mark.parametrize("text", SILENT[1:] + LOUD)
def test_only_what_is_inserted_learns(text):
    backbone = network()
    before = copy.deepcopy(backbone.state_dict())
    adapted = stir(adapt(text, backbone)).train()
    assert (adapted.channels, adapted.mean, adapted.std) == (backbone.channels, backbone.mean, backbone.std)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    for step in range(2):
        adapted(pictures(4))[:, 0].square().sum().backward()
        if step == 0:
            assert all(p.grad is not None and p.grad.isfinite().all() for p in adapted.parameters() if p.requires_grad)
        optimizer.step()
    after = backbone.state_dict()
    for key, value in before.items():
        assert torch.equal(after[key.replace("qkv.", "qkv.layer.") if "lora" in text else key], value), key
    assert all(p.grad is None for p in adapted.parameters() if not p.requires_grad)


def test_stochastic_branch_keeps_its_mean():
    """One branch alone, before any nonlinear layer."""
    branch = stir(adapt("stochastic_adapter(keep=0.7)", network())).attention[0].double()
    x = torch.randn(1, 5, 64).double()
    with torch.no_grad():
        added = branch.eval()(normalize(nn.Identity(), x), x)
        drawn = branch.train()(normalize(nn.Identity(), x.expand(4000, 5, 64)), x)
    check_gate(drawn, added, 0.7)


def check_gate(drawn, added, keep):
    """In training an output is zero or added / keep, the latter with probability `keep`; return where it is not zero."""
    kept = drawn.abs().sum((1, 2)) > 0
    assert torch.allclose(drawn[kept], (added / keep).expand_as(drawn[kept]), rtol=1e-9)
    assert kept.double().mean().item() == pytest.approx(keep, abs=0.03)  # four standard deviations
    return kept


@pytest.mark.parametrize("targets", ["qk", "qkv"])
def test_stochastic_lora_draws_one_gate_per_target(targets):
    """As in the authors' code, where q and k have a DropPath each."""
    layer = stir(adapt(f"lora(keep=0.7, rank=4, targets='{targets}')", network())).backbone.network.blocks[0].attn.qkv.double()
    x = torch.randn(1, 5, 64).double()
    with torch.no_grad():
        silent = layer.layer(x)
        added = (layer.eval()(x) - silent).chunk(3, -1)
        drawn = (layer.train()(x.expand(4000, 5, 64)) - silent).chunk(3, -1)
    kept = [check_gate(drawn["qkv".index(name)], added["qkv".index(name)], 0.7) for name in targets]
    for other in kept[1:]:
        assert (kept[0] & other).double().mean().item() == pytest.approx(0.49, abs=0.04)  # 0.7 with one gate for all
    if "v" not in targets:
        assert (drawn[2] == 0).all()


def test_samples_and_layers_are_switched_independently():
    adapted = stir(adapt("stochastic_adapter", network()))
    drawn = []
    for branch in (*adapted.attention, *adapted.mlp):
        branch.register_forward_hook(lambda *call: drawn.append(call[-1].abs().sum((1, 2)) > 0))
    adapted.train()(pictures(32))
    kept = torch.stack(drawn)
    assert kept.shape == (12, 32)
    assert len({tuple(row.tolist()) for row in kept}) == 12
    assert 0.3 < kept.double().mean() < 0.7


def test_adapter_is_its_equation():
    adapted = stir(adapt("stochastic_adapter(rank=4)", network())).double().eval()
    block, x = adapted.backbone.network.blocks[1], torch.randn(2, 5, 64).double()
    from unimetric.adapters._vit import run_block

    first, second = adapted.attention[1], adapted.mlp[1]
    z = x + block.attn(block.norm1(x)) + 0.1 * torch.relu(block.norm1(x) @ first.down) @ first.up
    z = z + block.mlp(block.norm2(z)) + 0.1 * torch.relu(block.norm2(z) @ second.down) @ second.up
    assert torch.allclose(run_block(block, x, first, second), z, rtol=1e-12, atol=1e-12)
    assert first.down.abs().max() > 0.5  # sqrt(3 / rank) is 0.87


def test_the_pool_is_its_equation_and_the_query_has_no_gradient():
    adapted = stir(adapt("prompt_pool(prompts=3, length=2)", network())).double()
    pool, x = adapted.prompt, torch.randn(4, 5, 64).double().requires_grad_()
    expected = torch.zeros(4, 2, 64).double()
    for b in range(4):
        query = (x[b].mean(0) + x[b].max(0).values) / 2
        for m in range(3):
            alpha = torch.cosine_similarity(query * pool.attention[m].softmax(0), pool.keys[m], dim=0)
            expected[b] += alpha * pool.prompts[m]
    tokens = pool(x, 0)
    assert torch.allclose(tokens, expected, rtol=1e-9)
    assert pool(x, 1) is None
    tokens.sum().backward()
    assert x.grad is None
    assert all(parameter.grad.abs().sum() > 0 for parameter in pool.parameters())


def test_a_pool_starts_with_orthogonal_keys_and_one_prompt_many_times():
    pool = adapt("prompt_pool", network()).prompt
    assert torch.allclose(pool.keys @ pool.keys.T, torch.eye(20), atol=1e-5)
    assert torch.allclose(pool.prompts[0] @ pool.prompts[0].T, torch.eye(8), atol=1e-5)
    assert torch.equal(pool.prompts, pool.prompts[:1].expand(20, -1, -1))


def test_prompts_stand_after_the_class_token_at_its_position():
    """The tokens that enter the first block, and what leaves the last."""
    adapted = adapt("prompt_pool(length=2)", network()).eval()
    net, seen = adapted.backbone.network, []
    net.blocks[0].norm1.register_forward_hook(lambda module, given, out: seen.append(given[0]))
    net.blocks[-1].norm1.register_forward_hook(lambda module, given, out: seen.append(given[0]))
    with torch.no_grad():
        adapted(pictures())
        patches = adapted.patches(pictures())
        plain = net._pos_embed(net.patch_embed(pictures()))
        expected = torch.cat([plain[:, :1], adapted.prompt(patches, 0) + net.pos_embed[:, :1], plain[:, 1:]], 1)
    assert torch.equal(seen[0], expected)
    assert seen[1].shape[1] == 1 + 2 + 4


def entering(adapted):
    """The tokens that enter each block."""
    seen = []
    hooks = [
        block.norm1.register_forward_hook(lambda module, given, out: seen.append(given[0])) for block in adapted.backbone.network.blocks
    ]
    with torch.no_grad():
        adapted(pictures())
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize(
    ("text", "placed"), [("vpt(length=2)", False), ("vpt(length=2, placed=True)", True), ("puma(length=2, pool='tokens')", True)]
)
def test_plain_tokens_get_the_class_position_if_placed(text, placed):
    adapted = adapt(text, network()).eval()
    net, tokens = adapted.backbone.network, entering(adapted)
    assert adapted.prompt.tokens.shape == (1, 2, 64)
    expected = adapted.prompt.tokens[0] + (net.pos_embed[0, :1] if placed else 0)
    assert torch.equal(tokens[0][:, 1:3], expected.expand(3, -1, -1))  # the same for every image
    assert net.pos_embed[0, 0].abs().max() > 0.01
    with torch.no_grad():
        plain = net._pos_embed(net.patch_embed(pictures()))
    assert torch.equal(tokens[0][:, [0, 3, 4, 5, 6]], plain)
    assert all(each.shape[1] == 7 for each in tokens)


def test_placed_tokens_need_a_class_position():
    """A network whose position embedding has no entry for the class token leaves the tokens unchanged."""
    placed = adapt("vpt(placed=True)", network("vit_small_patch14_reg4_dinov2", 56)).eval()
    plain = adapt("vpt", network("vit_small_patch14_reg4_dinov2", 56)).eval()
    assert torch.equal(placed(pictures(2, 56)), plain(pictures(2, 56)))


def test_puma_with_tokens_is_vpt_and_static_adapter():
    """The row "single prompt, static adapter" of table 3, in float64, block by block."""
    adapted = stir(adapt("puma(pool='tokens', keep=1.0, rank=4, length=2)", network())).double().train()
    net = adapted.backbone.network
    with torch.no_grad():
        x = net._pos_embed(net.patch_embed(pictures(dtype=torch.float64)))
        x = torch.cat([x[:, :1], (adapted.prompt.tokens[0] + net.pos_embed[0, :1]).expand(3, -1, -1), x[:, 1:]], 1)
        for block, first, second in zip(net.blocks, adapted.attention, adapted.mlp, strict=True):
            x = x + block.attn(block.norm1(x)) + 0.1 * torch.relu(block.norm1(x) @ first.down) @ first.up
            x = x + block.mlp(block.norm2(x)) + 0.1 * torch.relu(block.norm2(x) @ second.down) @ second.up
        expected = net.norm(torch.cat([x[:, :1], x[:, 3:]], 1))
        assert torch.allclose(adapted(pictures(dtype=torch.float64)), expected, rtol=1e-9, atol=1e-9)
    bound = (6 / (3 * 16 * 16 + 64)) ** 0.5
    start = adapt("puma(pool='tokens', length=64)", network()).prompt.tokens
    assert 0.95 * bound < start.abs().max() <= bound


def test_puma_with_lora_is_both():
    """PUMA's parameters in a network whose projections have the merged update of LoRA."""
    both = stir(adapt("puma(rank=4, length=2, prompts=3, lora_rank=4)", network())).eval()
    assert both.merged() is both and "backbone.network.blocks.0.attn.qkv.weight" not in both.state_dict()  # nothing is merged in part
    own = {name: value for name, value in both.state_dict().items() if "qkv" not in name}
    plain = adapt("puma(rank=4, length=2, prompts=3)", network()).eval()
    assert not plain.load_state_dict(own, strict=False).unexpected_keys
    images = pictures()
    with torch.no_grad():
        assert not torch.allclose(both(images), plain(images), atol=1e-3)
        for block, adapted in zip(plain.backbone.network.blocks, both.backbone.network.blocks, strict=True):
            block.attn.qkv.load_state_dict(adapted.attn.qkv.merged().state_dict())
        assert torch.allclose(both(images), plain(images), atol=1e-5)


def test_deep_prompts_take_the_place_of_the_last_ones():
    adapted = adapt("vpt(deep=True, length=2)", network()).eval()
    seen = []
    for block in adapted.backbone.network.blocks:
        block.norm1.register_forward_hook(lambda module, given, out: seen.append(given[0]))
    with torch.no_grad():
        adapted(pictures())
    for number, tokens in enumerate(seen):
        assert tokens.shape[1] == 7
        assert torch.equal(tokens[1, 1:3], adapted.prompt.tokens[number])
    assert len(adapted.prompt.tokens) == 6


@pytest.mark.parametrize("targets", ["qk", "qv", "k"])
def test_merged_lora_is_the_unmerged_one(targets):
    adapted = stir(adapt(f"lora(rank=4, targets='{targets}')", network())).double().eval()
    expected = adapted(pictures(dtype=torch.float64))
    plain = network().double().eval()
    merged = copy.deepcopy(adapted).merged()
    assert list(merged.state_dict()) == list(plain.state_dict())
    assert torch.allclose(merged(pictures(dtype=torch.float64)), expected, rtol=1e-10, atol=1e-12)
    assert (plain(pictures(dtype=torch.float64)) - expected).abs().max() > 1e-3


def test_what_cannot_be_merged_stays():
    adapted = adapt("puma", network())
    assert adapted.merged() is adapted
    assert type(adapt("linear_probe", network()).merged()).__name__ == "Timm"


def test_lean_norm_has_the_gradient_of_torch():
    torch.manual_seed(0)
    norm, matrix = nn.LayerNorm(8).double(), torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(8))
        norm.bias.copy_(torch.randn(8))
    norm.requires_grad_(False)
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 5, 8, dtype=torch.float64)
    normal = normalize(norm, x)
    assert normal.core is not None
    lean = torch.autograd.grad((normal.value * weight).sum() + normal.project(matrix).square().sum(), [x, matrix])
    plain = torch.autograd.grad((norm(x) * weight).sum() + (norm(x) @ matrix).square().sum(), [x, matrix])
    for one, other in zip(lean, plain, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    # Each of its two outputs alone.
    assert torch.allclose(*(torch.autograd.grad((f * weight).sum(), x)[0] for f in (normalize(norm, x).value, norm(x))), rtol=1e-9)
    alone = (torch.autograd.grad(f.sum(), x)[0] for f in (normalize(norm, x).project(matrix), norm(x) @ matrix))
    assert torch.allclose(*alone, rtol=1e-9)
    assert normalize(norm, x.detach()).core is None


def kept_bytes(module, images):
    """Memory that the graph holds for the backward pass, each storage once, without weights, be they cast or not."""
    weights = {parameter.numel() for parameter in module.parameters()}
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if tensor.numel() not in weights:
            held[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(images)[:, 0].float().sum()
    del loss
    return sum(size for size, _ in held.values())


def test_little_is_kept_for_the_backward_pass():
    """Half of what full training keeps, but for the adapters' own: no input of a frozen product, and no float32 stream."""
    images = pictures(9, 64)
    full = kept_bytes(network(image_size=64).train(), images)
    assert kept_bytes(stir(adapt("puma(rank=16, prompts=4, length=1)", network(image_size=64))).train(), images) < 0.7 * full
    assert kept_bytes(adapt("linear_probe", network()).train(), images) == 0
    adapted = adapt("stochastic_adapter", network())
    seen = []
    adapted.backbone.network.blocks[0].attn.register_forward_hook(lambda module, given, out: seen.append(out.requires_grad))
    adapted.train()(images)
    assert seen == [False]  # nothing that learns stands before it


def test_adapters_survive_autocast_and_the_compiler():
    backbone = network()
    backbone.network.blocks = backbone.network.blocks[:1]
    adapted = stir(adapt("puma(rank=4, prompts=3, length=2, keep=1.0)", backbone)).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        adapted(pictures())[:, 0].float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in adapted.parameters() if p.requires_grad)
    expected = {name: p.grad.clone() for name, p in adapted.named_parameters() if p.requires_grad}
    adapted.zero_grad()
    compiled = torch.compile(adapted, backend="eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled(pictures())[:, 0].float().sum().backward()
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(parameter.grad, expected[name], rtol=0.1, atol=0.02 * expected[name].abs().max().item()), name


@pytest.mark.parametrize("name", [name for name in names("adapters") if name not in ("linear_probe", "last_layers")])
def test_another_network_is_refused(name):
    with pytest.raises(UnimetricError, match="vision transformer"):
        adapt(name, create("backbones", "small(channels=16)"))


def test_a_linear_probe_leaves_statistics_alone():
    adapted = adapt("linear_probe", create("backbones", "small(channels=16)")).train()
    before = copy.deepcopy(adapted.state_dict())
    adapted(pictures())
    assert all(torch.equal(value, before[key]) for key, value in adapted.state_dict().items())


@pytest.mark.parametrize("text", ["puma", "lora", "vpt"])
def test_a_convolutional_stem_keeps_its_statistics(text):
    """timm's hybrids are plain transformers behind a ResNet, which has BatchNorm."""
    model = adapt(text, network("vit_small_resnet26d_224", 64)).train()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
    model(pictures(size=64))
    assert norms and not any(norm.running_mean.any() for norm in norms)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stochastic_adapter(keep=0.0)", "`keep` must be above 0 and at most 1, got 0.0"),
        ("stochastic_adapter(rank=0)", "`rank` must be at least 1, got 0"),
        ("stochastic_adapter(layers=-1)", "`layers` must be at least 0, got -1"),
        ("lora(targets='qx')", "`targets`"),
        ("lora(targets='')", "`targets`"),
        ("lora(targets='qq')", "`targets`"),
        ("lora(keep=2.0)", "`keep` must be above 0 and at most 1, got 2.0"),
        ("lora(rank=0)", "`rank` must be at least 1, got 0"),
        ("adaptformer(rank=-1)", "`rank` must be at least 1, got -1"),
        ("prompt_pool(prompts=0)", "`prompts` must be at least 1, got 0"),
        ("prompt_pool(length=-2)", "`length` must be at least 1, got -2"),
        ("vpt(length=0)", "`length` must be at least 1, got 0"),
        ("vpt(deep=True, placed=True)", "`placed=True` requires `deep=False`"),
        ("puma(layers=7)", "`layers` must be between 0 and 6, got 7"),
        ("puma(rank=0)", "`rank` must be at least 1, got 0"),
        ("puma(length=0)", "`length` must be at least 1, got 0"),
        ("puma(length=0, pool='tokens')", "`length` must be at least 1, got 0"),
        ("puma(prompts=0)", "`prompts` must be at least 1, got 0"),
        ("puma(pool='mean')", "`pool` must be one of `keys`, `tokens`, got 'mean'"),
    ],
)
def test_adapter_rejects_invalid_arguments(text, message):
    with pytest.raises(UnimetricError, match=re.escape(message)) as error:
        adapt(text, network())
    assert error.value.hint
