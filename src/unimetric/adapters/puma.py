"""PUMA: stochastic adapters and a prompt pool."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from torch import nn

from unimetric.adapters._prompts import Pool
from unimetric.adapters._vit import Adapted, frozen_transformer
from unimetric.adapters.lora import add_low_rank
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
    lora_rank: Natural = 0,
    lora_keep: Annotated[float, Range(above=0, most=1)] = 1.0,
) -> nn.Module:
    """Insert PUMA's stochastic adapters and conditional prompt into a frozen transformer.

    Combines `stochastic_adapter` in every block with `prompt_pool` at the input: 2.44 million
    parameters for a ViT-S. With `pool="tokens"`, the prompt is `length` plain tokens, as in
    `vpt(placed=True)`. The row "single prompt, static adapter" of table 3 is
    `puma(pool="tokens", keep=1.0)`. The rows "PUMA + LoRA" and "PUMA + Stochastic LoRA" of table 7 are
    `puma(lora_rank=128)` and `puma(lora_rank=128, lora_keep=0.5)`: 4.84 million parameters with the head.

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
        lora_rank: Rank of additional updates of query and key, as in `lora`; 0 for none.
        lora_keep: Probability that an update is active for a sample in training, in (0, 1].

    Returns:
        The backbone with adapters and prompt, as a module with the same input and output shapes.
    """
    network = frozen_transformer(backbone)
    if lora_rank:
        add_low_rank(network, rank=lora_rank, scale=32 / lora_rank, targets="qk", keep=lora_keep)
    attention, mlp = branches(network, rank=rank, keep=keep, scale=scale, layers=layers)
    prompt: nn.Module
    if pool == "tokens":
        prompt = plain_tokens(network, length=length, layers=1, placed=True)
    else:
        prompt = Pool(network.embed_dim, prompts=prompts, length=length)
    return Adapted(backbone, prompt=prompt, attention=attention, mlp=mlp, scaled=scaled)
