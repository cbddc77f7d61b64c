"""Frozen timm transformer with prompt tokens and branches parallel to its blocks.

The network is composed, not reimplemented: its embedding, blocks and norm run unchanged. Shapes use B for
images, N for tokens (class, prompts and patches), P for prompt tokens and C for channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from timm.models.eva import Eva, EvaBlock
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unimetric.adapters._prompts import Pool
from unimetric.adapters._wrapped import Wrapped
from unimetric.errors import UnimetricError
from unimetric.foreign import completed


def frozen_transformer(backbone: Any) -> Any:
    """Freeze a backbone and return its timm transformer.

    It is a `VisionTransformer`, such as DINOv2 or SigLIP, or an `Eva`, such as DINOv3 or EVA-02.

    Raises:
        UnimetricError: If the backbone is not a plain vision transformer of timm.
    """
    network = completed("backbones", backbone).find_transformer()
    block_type = EvaBlock if isinstance(network, Eva) else Block
    if not isinstance(network, VisionTransformer | Eva) or not all(isinstance(block, block_type) for block in network.blocks):
        raise UnimetricError(
            f"this adapter requires a plain vision transformer of timm, which the backbone `{type(backbone).__name__}` does not have",
            "use `backbone = \"timm(name='vit_small_patch16_224')\"`, or `adapter = 'linear_probe'`, which accepts any backbone",
        )
    backbone.requires_grad_(False)
    return network


class Normalized(NamedTuple):
    """Output of a frozen LayerNorm.

    Args:
        value: Output, (B, N, C).
        core: Output before scale and shift, (B, N, C), in the precision of the matrix products. None
            if nothing is stored for a backward pass.
        scale, shift: Scale and shift of the norm, (C,) each. None if `core` is None.
    """

    value: Tensor
    core: Tensor | None
    scale: Tensor | None
    shift: Tensor | None

    def project(self, matrix: Float[Tensor, "C R"], bias: Float[Tensor, "R"] | None = None) -> Float[Tensor, "B N R"]:
        """Return `value @ matrix + bias`.

        Scale and shift are multiplied into the matrix. Its gradient then needs only `core`, which is stored anyway.
        """
        if self.core is None or self.scale is None or self.shift is None:
            return nn.functional.linear(self.value, matrix.T, bias)
        shifted = self.shift @ matrix
        return nn.functional.linear(self.core, (self.scale[:, None] * matrix).T, shifted if bias is None else shifted + bias)


def _normal(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Apply LayerNorm, and return what its backward pass needs.

    Returns the output, the output before scale and shift, and the reciprocal standard deviation.
    """
    value, mean, rstd = torch.native_layer_norm(x, (x.shape[-1],), weight, bias, eps)
    return value.to(dtype), torch.addcmul(-mean * rstd, x, rstd).to(dtype), rstd


def _back(value: Tensor | None, core: Tensor | None, kept: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """Compute LayerNorm's input gradient in float32 from those of both outputs of `_normal`."""
    slope = torch.zeros_like(kept, dtype=rstd.dtype) if core is None else core.to(rstd.dtype)
    slope = slope if value is None else torch.addcmul(slope, value, weight)
    zero, one = torch.zeros_like(rstd), torch.ones_like(rstd)
    shape, mask = (kept.shape[-1],), [True, False, False]
    return torch.ops.aten.native_layer_norm_backward(slope, kept.to(rstd.dtype), shape, zero, one, None, None, mask)[0] * rstd


FUSE = True  # on a GPU; benchmarks/universal.py --plain sets it to False
_unfused: set[str] = set()


@functools.cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _run(function: Callable[..., Any], device: torch.device, *arguments: Any) -> Any:
    """Run a function, compiled into one kernel on a GPU.

    The uncompiled function reads all tokens about six times. It runs if compilation fails.
    """
    if FUSE and device.type == "cuda" and not torch.compiler.is_compiling() and function.__name__ not in _unfused:
        try:
            return _fused(function)(*arguments)
        except Exception:  # a missing C compiler and a missing Triton raise different errors; uncompiled code is only slower
            _unfused.add(function.__name__)
    return function(*arguments)


class _Normalize(torch.autograd.Function):
    """LayerNorm that stores only its normalized input, in half precision under autocast.

    This is a third of the usual memory. torch's LayerNorm stores the float32 stream, and a trainable
    matrix after it stores its output.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        value, core, rstd = _run(_normal, x.device, x, weight, bias, eps, dtype)
        ctx.save_for_backward(core, rstd, weight)
        ctx.set_materialize_grads(False)
        return value, core

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, value: Tensor | None, core: Tensor | None) -> tuple[Tensor | None, ...]:
        kept, rstd, weight = ctx.saved_tensors
        if value is None and core is None:
            return None, None, None, None, None
        return _run(_back, kept.device, value, core, kept, rstd, weight), None, None, None, None


def normalize(norm: nn.Module, x: Float[Tensor, "B N C"]) -> Normalized:
    """Apply a frozen LayerNorm with little stored memory.

    Without a gradient, and for any other norm, the module itself runs. Under autocast the output is
    cast here, once for all layers that read it.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    lean = torch.is_grad_enabled() and x.requires_grad and x.dtype in (torch.float32, torch.float64)
    if not lean or not isinstance(norm, nn.LayerNorm) or norm.weight is None or norm.bias is None or norm.weight.requires_grad:
        return Normalized(norm(x).to(dtype), None, None, None)
    value, core = _Normalize.apply(x, norm.weight, norm.bias, norm.eps, dtype)
    return Normalized(value, core, norm.weight, norm.bias)


def run_block(
    block: Any,
    x: Float[Tensor, "B N C"],
    attention: nn.Module | None,
    mlp: nn.Module | None,
    *,
    scaled: bool = False,
    rope: Tensor | None = None,
) -> Float[Tensor, "B N C"]:
    """Run a timm block with branches parallel to its attention and its MLP.

    Args:
        block: Block of timm.
        x: Input of the block.
        attention: Branch parallel to the attention. Receives the first norm's output and the stream before it.
        mlp: Branch parallel to the MLP. Receives the second norm's output and the stream before it.
        scaled: Whether the block's LayerScale also applies to the branches. If not, a branch is added after it.
        rope: Rotary position embedding of the tokens after the prefix, for an `EvaBlock`.

    Returns:
        Output of the block, (B, N, C).
    """
    scales = _scales(block)
    normal = normalize(block.norm1, x)
    branch = None if attention is None else attention(normal, x)
    own = block.attn(normal.value) if rope is None else block.attn(normal.value, rope=rope)
    x = x + _half(own, branch, scales[0], block.drop_path1, scaled)
    normal = normalize(block.norm2, x)
    branch = None if mlp is None else mlp(normal, x)
    return x + _half(block.mlp(normal.value), branch, scales[1], block.drop_path2, scaled)


def _scales(block: Any) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return the LayerScale of both halves of a block."""
    if isinstance(block, EvaBlock):  # it stores the factors as parameters, or None
        return functools.partial(_multiply, block.gamma_1), functools.partial(_multiply, block.gamma_2)
    return block.ls1, block.ls2


def _multiply(factor: Tensor | None, x: Tensor) -> Tensor:
    return x if factor is None else factor * x


def embed_patches(network: Any, images: Float[Tensor, "B 3 H W"]) -> tuple[Float[Tensor, "B N C"], Tensor, Tensor | None]:
    """Run a transformer up to its first block.

    Returns:
        The tokens (prefix, then patches), the patch embeddings without position, and the rotary position embedding of
        the patches, or None.
    """
    patches = network.patch_embed(images)
    if isinstance(network, Eva):
        x, rope = network._pos_embed(patches)
        return network.norm_pre(x), _flat(patches), rope
    return network.norm_pre(network.patch_drop(network._pos_embed(patches))), _flat(patches), None


def extend_rope(rope: Tensor | None, count: int) -> Tensor | None:
    """Insert rotations by zero for `count` prompt tokens before the patches.

    A rotary embedding (..., N, 2 F) has the sines of F angles, then the cosines.
    """
    if rope is None or not count:
        return rope
    sines = rope.new_zeros(*rope.shape[:-2], count, rope.shape[-1] // 2)
    return torch.cat([torch.cat([sines, torch.ones_like(sines)], -1), rope], -2)


def _half(own: Tensor, branch: Tensor | None, scale: Callable[[Tensor], Tensor], drop: nn.Module, scaled: bool) -> Float[Tensor, "B N C"]:
    """Sum one half of a block and its branch.

    Under autocast the sum is in half precision; the stream is float32.
    """
    if branch is None:
        return drop(scale(own))
    return drop(scale(own + branch)) if scaled else drop(scale(own)) + branch


class Mergeable(nn.Module):
    """Module that can be replaced by an equal one without inserted parameters, for testing."""

    def merged(self) -> nn.Module:
        """Return the replacement."""
        raise NotImplementedError


class Adapted(Wrapped):
    """Frozen backbone with prompt tokens and branches.

    The output has the shape of the plain backbone's output: prompt tokens are removed after the last block.

    Args:
        backbone: `backbones.Timm` with a transformer.
        prompt: Module `prompt(patches, layer)` that returns the (B, P, C) prompt tokens of a layer, or
            None to keep those of the previous layer. Its attribute `placed` is whether the tokens
            receive the position embedding of the class token.
        attention: Branches parallel to the attention, one per adapted block.
        mlp: Branches parallel to the MLP, one per adapted block.
        scaled: Whether LayerScale also applies to the branches; see `run_block`.

    Shape:
        (B, 3, H, W) -> (B, 1 + N, C)
    """

    def __init__(
        self,
        backbone: Any,
        *,
        prompt: nn.Module | None = None,
        attention: Sequence[nn.Module] = (),
        mlp: Sequence[nn.Module] = (),
        scaled: bool = False,
    ) -> None:
        super().__init__(backbone)
        self.scaled = scaled
        self.prompt: Any = prompt
        self.attention, self.mlp = nn.ModuleList(attention), nn.ModuleList(mlp)
        self.pool_size = len(prompt.keys) if isinstance(prompt, Pool) else 0

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        self.backbone.find_transformer().patch_embed.eval()  # freezes the BatchNorm statistics of a convolutional stem
        return self

    def patches(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N C"]:
        """Return the patch embeddings without position embeddings."""
        return _flat(self.backbone.find_transformer().patch_embed(images))

    def preference(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B M"]:
        if not self.pool_size:
            return super().preference(images)
        return self.prompt.preference(self.patches(images))

    def merged(self) -> Any:
        """Return the plain backbone if its weights can hold all inserted parameters, else self."""
        if self.prompt is not None or len(self.attention) or len(self.mlp):
            return self
        for module in list(self.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, Mergeable):
                    setattr(module, name, child.merged())
        return self.backbone

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N C"]:
        network, count = self.backbone.find_transformer(), 0
        prefix: int = network.num_prefix_tokens
        has_position = network.cls_token is not None and network.pos_embed is not None and not network.no_embed_class
        position = network.pos_embed[:, :1] if has_position else None
        x, flat, rope = embed_patches(network, images)
        mixed = vars(network).get("rope_mixed", False)  # one rotary embedding per block
        for number, block in enumerate(network.blocks):
            tokens = None if self.prompt is None else self.prompt(flat, number)
            if tokens is not None:
                tokens = tokens + position if self.prompt.placed and position is not None else tokens
                x = torch.cat([x[:, :prefix], tokens.to(x.dtype), x[:, prefix + count :]], 1)
                count = tokens.shape[1]
            turned = extend_rope(rope[number] if mixed and rope is not None else rope, count)
            x = run_block(block, x, _nth(self.attention, number), _nth(self.mlp, number), scaled=self.scaled, rope=turned)
        if count:
            x = torch.cat([x[:, :prefix], x[:, prefix + count :]], 1)
        stage = network.norm(x)
        summary = network.forward_head(stage, pre_logits=True)
        return torch.cat([summary[:, None], stage[:, prefix:]], 1)


def _flat(patches: Tensor) -> Float[Tensor, "B N C"]:
    return patches.flatten(1, 2) if patches.dim() == 4 else patches  # networks with a dynamic image size return a map


def _nth(branches: nn.ModuleList, number: int) -> Any:
    return branches[number] if number < len(branches) else None


def adapted_layers(network: Any, layers: int) -> int:
    """Return the number of blocks with branches: `layers`, or all for 0."""
    depth = len(network.blocks)
    if not 0 <= layers <= depth:
        raise UnimetricError(f"`layers` must be between 0 and {depth}, got {layers}", "use `layers=0` for all blocks")
    return layers or depth
