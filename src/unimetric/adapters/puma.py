"""PUMA: stochastic adapters and a prompt pool."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from torch import nn

from unimetric.adapters._prompts import Pool
from unimetric.adapters._vit import Adapted, frozen_transformer
from unimetric.adapters.stochastic_adapter import branches
from unimetric.adapters.vpt import plain_tokens
from unimetric.arguments import Count, Natural, Range, Real


def puma(
    backbone: Any,
    *,
    rank: Count = 128,
    keep: Annotated[float, Range(above=0, most=1)] = 0.5,
    scale: Real = 0.1,
    layers: Natural = 0,
    scaled: bool = False,
    prompts: Count = 20,
    length: Count = 8,
    pool: Literal["keys", "tokens"] = "keys",
) -> nn.Module:
    """Insert PUMA's stochastic adapters and conditional prompt into a frozen transformer.

    Combines `stochastic_adapter` in every block with `prompt_pool` at the input: 2.44 million
    parameters for a ViT-S. With `pool="tokens"`, the prompt is `length` plain tokens, as in
    `vpt(placed=True)`. The row "single prompt, static adapter" of table 3 is
    `puma(pool="tokens", keep=1.0)`.

    Differs from the paper:
        The authors' code trains with settings that the paper does not state. For proxy losses, every
        epoch repeats the same batches, because the sampler's epoch is not set. The test recall is
        computed after 21, 41, 61 and 81 epochs, so results come from at most 81 of the 100 epochs. The
        epoch is selected on unified recall. DDP averages the gradients of four batch shards, so the
        gradient clip of 1.0 acts like 4.0 on one device. `stochastic_adapter`, `prompt_pool`, `vpt`,
        `lora` and `adaptformer` list the differences of the components. In that code, AdaptFormer's
        up-projection starts with standard deviation 0.02 instead of zero.

    Reference:
        Universal metric learning with parameter-efficient transfer learning (Kim et al., arXiv 2023).

    Args:
        backbone: Backbone with a timm vision transformer.
        rank: Width of the adapters' bottleneck, at least 1.
        keep: Probability that an adapter is active for a sample in training, in (0, 1].
        scale: Fixed factor on the adapters.
        layers: Number of blocks with adapters, counted from the input; 0 for all.
        scaled: Whether LayerScale also applies to the adapters; see `stochastic_adapter`.
        prompts: Number of prompts in the pool, at least 1. Unused with `pool="tokens"`.
        length: Number of tokens per prompt, at least 1.
        pool: Type of prompt: `keys` for a pool weighted by keys per image, `tokens` for the same
            plain tokens for every image.

    Returns:
        The backbone with adapters and prompt, as a module with the same input and output shapes.
    """
    network = frozen_transformer(backbone)
    attention, mlp = branches(network, rank=rank, keep=keep, scale=scale, layers=layers)
    prompt: nn.Module
    if pool == "tokens":
        prompt = plain_tokens(network, length=length, layers=1, placed=True)
    else:
        prompt = Pool(network.embed_dim, prompts=prompts, length=length)
    return Adapted(backbone, prompt=prompt, attention=attention, mlp=mlp, scaled=scaled)
