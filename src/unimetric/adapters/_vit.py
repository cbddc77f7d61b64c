"""A frozen transformer of timm with something inserted: prompts among its tokens, branches beside its blocks.

By composition: the network's own embedding, blocks and norm are walked through as they are, and none of them is written anew.
B pictures, N tokens (of the class, prompts and patches), P prompt tokens, C channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unimetric.errors import UnimetricError


def frozen_transformer(backbone: Any) -> Any:
    """The timm transformer in a backbone, none of whose weights learns any more; anything else is refused."""
    network = getattr(backbone, "network", None)
    if not isinstance(network, VisionTransformer) or not all(isinstance(block, Block) for block in network.blocks):
        name = type(network if network is not None else backbone).__name__
        raise UnimetricError(
            f"this adapter goes into a plain vision transformer of timm, not into `{name}`",
            "write `backbone = \"timm(name='vit_small_patch16_224')\"`, or `adapter = 'linear_probe'`, which takes any",
        )
    backbone.requires_grad_(False)
    return network


class Normalised(NamedTuple):
    """What a frozen LayerNorm gives.

    Args:
        value: (B, N, C) its output.
        core: (B, N, C) the same before scale and shift, in the precision of the matrix products; None where nothing is to be kept.
        scale, shift: (C,) its own.
    """

    value: Tensor
    core: Tensor | None
    scale: Tensor | None
    shift: Tensor | None

    def project(self, matrix: Float[Tensor, "C R"], bias: Float[Tensor, "R"] | None = None) -> Float[Tensor, "B N R"]:
        """`value @ matrix + bias`. Scale and shift move into the matrix, so that its gradient needs `core`, which is kept anyway."""
        if self.core is None or self.scale is None or self.shift is None:
            return nn.functional.linear(self.value, matrix.T, bias)
        shifted = self.shift @ matrix
        return nn.functional.linear(self.core, (self.scale[:, None] * matrix).T, shifted if bias is None else shifted + bias)


def _normal(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm's output, the same before scale and shift, and one over the deviation."""
    value, mean, rstd = torch.native_layer_norm(x, (x.shape[-1],), weight, bias, eps)
    return value.to(dtype), torch.addcmul(-mean * rstd, x, rstd).to(dtype), rstd


def _back(value: Tensor | None, core: Tensor | None, kept: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """LayerNorm's backward pass, from the gradients of both that `_normal` gives; in float32, though they come in half precision."""
    slope = torch.zeros_like(kept, dtype=rstd.dtype) if core is None else core.to(rstd.dtype)
    slope = slope if value is None else torch.addcmul(slope, value, weight)
    zero, one = torch.zeros_like(rstd), torch.ones_like(rstd)
    shape, mask = (kept.shape[-1],), [True, False, False]
    return torch.ops.aten.native_layer_norm_backward(slope, kept.to(rstd.dtype), shape, zero, one, None, None, mask)[0] * rstd


FUSE = True  # on a GPU; benchmarks/universal.py --plain measures without
_unfused: set[str] = set()


@functools.cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _run(function: Callable[..., Any], device: torch.device, *arguments: Any) -> Any:
    """On a GPU the compiler makes one kernel of a function that would pass over all tokens half a dozen times; without one, as it is."""
    if FUSE and device.type == "cuda" and not torch.compiler.is_compiling() and function.__name__ not in _unfused:
        try:
            return _fused(function)(*arguments)
        except Exception:  # no C compiler, no Triton, each with an error of its own: slower, and the same numbers
            _unfused.add(function.__name__)
    return function(*arguments)


class _Normalise(torch.autograd.Function):
    """LayerNorm that keeps only its normalised input, in half precision under autocast.

    A third of what is kept otherwise: torch's LayerNorm keeps the float32 stream, and a matrix beside it that learns keeps its output.
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


def normalise(norm: nn.Module, x: Float[Tensor, "B N C"]) -> Normalised:
    """A frozen LayerNorm. Where no gradient goes through it, and for any other norm, just the module itself.

    Under autocast its output is cast here, once for all that read it.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    lean = torch.is_grad_enabled() and x.requires_grad and x.dtype in (torch.float32, torch.float64)
    if not lean or not isinstance(norm, nn.LayerNorm) or norm.weight is None or norm.bias is None or norm.weight.requires_grad:
        return Normalised(norm(x).to(dtype), None, None, None)
    value, core = _Normalise.apply(x, norm.weight, norm.bias, norm.eps, dtype)
    return Normalised(value, core, norm.weight, norm.bias)


def through(
    block: Any, x: Float[Tensor, "B N C"], attention: nn.Module | None, mlp: nn.Module | None, *, scaled: bool = False
) -> Float[Tensor, "B N C"]:
    """A block of timm with branches beside its two halves.

    Args:
        block: timm's.
        x: its input.
        attention: a branch that gets the first norm's output (`Normalised`), beside the attention.
        mlp: one that gets the second norm's, and the stream before it, beside the MLP.
        scaled: LayerScale, where the block has it, scales a branch as it does the half beside it; else the branch is added after it.
    """
    normal = normalise(block.norm1, x)
    beside = None if attention is None else attention(normal, x)
    x = x + _half(block.attn(normal.value), beside, block.ls1, block.drop_path1, scaled)
    normal = normalise(block.norm2, x)
    beside = None if mlp is None else mlp(normal, x)
    return x + _half(block.mlp(normal.value), beside, block.ls2, block.drop_path2, scaled)


def _half(own: Tensor, branch: Tensor | None, scale: nn.Module, drop: nn.Module, scaled: bool) -> Float[Tensor, "B N C"]:
    """What a half of a block and the branch beside it add to the stream. It is float32: they meet before, half as wide under autocast."""
    if branch is None:
        return drop(scale(own))
    return drop(scale(own + branch)) if scaled else drop(scale(own)) + branch


class Adapted(nn.Module):
    """A frozen backbone and what is inserted: (B, 3, H, W) -> (B, 1 + N, C) as without; prompt tokens are taken out again at the end.

    Args:
        backbone: `backbones.Timm` with a transformer.
        prompt: `prompt(patches, layer)` gives the (B, P, C) prompt tokens that enter a layer, or None where those that are there go on.
        attention: a branch beside each block's attention, for as many blocks as it has.
        mlp: the same, beside the MLP.
        scaled: as in `through`.
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
        super().__init__()
        self.backbone, self.scaled = backbone, scaled
        self.prompt: Any = prompt
        self.attention, self.mlp = nn.ModuleList(attention), nn.ModuleList(mlp)
        self.channels: int = backbone.channels
        self.mean: tuple[float, ...] = backbone.mean
        self.std: tuple[float, ...] = backbone.std

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        self.backbone.network.patch_embed.eval()  # a convolutional stem has a BatchNorm, whose statistics are frozen, too
        return self

    def patches(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N C"]:
        """The patch embeddings before anything is added to them."""
        return _flat(self.backbone.network.patch_embed(images))

    def merged(self) -> Any:
        """The plain backbone, where all that was inserted can be multiplied into its weights; else this itself."""
        for module in list(self.modules()):
            for name, child in list(module.named_children()):
                merged: Any = getattr(child, "merged", None)
                if merged is not None:
                    setattr(module, name, merged())
        return self.backbone if self.prompt is None and not len(self.attention) and not len(self.mlp) else self

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N C"]:
        network, count = self.backbone.network, 0
        prefix: int = network.num_prefix_tokens
        has_position = network.cls_token is not None and network.pos_embed is not None and not network.no_embed_class
        position = network.pos_embed[:, :1] if has_position else None
        patches = network.patch_embed(images)
        x = network.norm_pre(network.patch_drop(network._pos_embed(patches)))
        flat = _flat(patches)
        for number, block in enumerate(network.blocks):
            tokens = None if self.prompt is None else self.prompt(flat, number)
            if tokens is not None:
                tokens = tokens + position if self.prompt.placed and position is not None else tokens
                x = torch.cat([x[:, :prefix], tokens.to(x.dtype), x[:, prefix + count :]], 1)
                count = tokens.shape[1]
            x = through(block, x, _nth(self.attention, number), _nth(self.mlp, number), scaled=self.scaled)
        if count:
            x = torch.cat([x[:, :prefix], x[:, prefix + count :]], 1)
        stage = network.norm(x)
        summary = network.forward_head(stage, pre_logits=True)
        return torch.cat([summary[:, None], stage[:, prefix:]], 1)


def _flat(patches: Tensor) -> Float[Tensor, "B N C"]:
    return patches.flatten(1, 2) if patches.dim() == 4 else patches  # a network of any picture size keeps the map


def _nth(branches: nn.ModuleList, number: int) -> Any:
    return branches[number] if number < len(branches) else None


def adapted_layers(network: Any, layers: int) -> int:
    """How many blocks get a branch: the first so many, or all for 0."""
    depth = len(network.blocks)
    if not 0 <= layers <= depth:
        raise UnimetricError(f"`layers={layers}`, but the network has {depth} blocks", "write 0 for all of them")
    return layers or depth
