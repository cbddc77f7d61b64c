"""The Mix Transformer of SegFormer, which the coded residual transform stands on."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from unimetric.backbones._convnets import IMAGENET_MEAN, IMAGENET_STD, tokens_of
from unimetric.backbones._layouts import recognize, to_segformer
from unimetric.backbones._weights import fill, read_weights
from unimetric.errors import UnimetricError, closest

_DEPTHS = {"b0": (2, 2, 2, 2), "b1": (2, 2, 2, 2), "b2": (3, 4, 6, 3), "b3": (3, 4, 18, 3), "b4": (3, 8, 27, 3), "b5": (3, 6, 40, 3)}


class Mit(nn.Module):
    """SegFormer's encoder MiT-B0 to B5 (Xie et al., NeurIPS 2021), through transformers: (B, 3, H, W) -> (B, 1 + N, C).

    Four stages of overlapping patches; at 227 pixels their maps are 57, 29, 15 and 8 wide, so N = 64, and at 224 N = 49. C is 512, and 256
    for B0. Tokens come after the last LayerNorm, the summary is their mean, which is what the ImageNet classifier saw.

    Differs from transformers: the LayerNorms around attention, Mix-FFN and stages have eps 1e-6, as in the original code, not 1e-5.

    Args:
        name: `b0` to `b5`.
        pretrained: fetch the ImageNet weights `nvidia/mit-b..` from the hub.
        weights: a local file instead, in the original layout or Hugging Face's.
        drop_path: how often the deepest block is skipped in training; the others less, in proportion.
    """

    mean = IMAGENET_MEAN
    std = IMAGENET_STD

    def __init__(self, *, name: str = "b1", pretrained: bool = False, weights: str = "", drop_path: float = 0.1) -> None:
        super().__init__()
        if name not in _DEPTHS:
            raise UnimetricError(f"there is no MiT `{name}`", closest(name, _DEPTHS))
        if pretrained and weights:
            raise UnimetricError("both `pretrained` and `weights` are given", "keep one of them")
        try:
            from transformers import SegformerConfig, SegformerModel
        except ImportError:
            raise UnimetricError("`mit` needs the package transformers", "pip install 'unimetric[mit]'") from None
        state = read_weights(weights, backbone="mit") if weights else {}
        widths = (32, 64, 160, 256) if name == "b0" else (64, 128, 320, 512)
        config = SegformerConfig(depths=_DEPTHS[name], hidden_sizes=widths, drop_path_rate=drop_path)
        try:
            network: Any = SegformerModel.from_pretrained(f"nvidia/mit-{name}", config=config) if pretrained else SegformerModel(config)
        except Exception as error:  # transformers and the hub each raise their own
            reason = (str(error).splitlines() or [""])[0][:200]
            raise UnimetricError(
                f"transformers cannot make `nvidia/mit-{name}`: {type(error).__name__}: {reason}",
                "the hub must be reachable for `pretrained=True`; `weights='file.safetensors'` reads a local file",
            ) from None
        for place, module in network.named_modules():
            if isinstance(module, nn.LayerNorm) and "attention" not in place and "patch_embeddings" not in place:
                module.eps = 1e-6
        if weights:
            fill(network, to_segformer(state, network.state_dict()), weights, layout=recognize(state).name)
        self.network = network
        self.channels: int = widths[-1]

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N C"]:
        return tokens_of(self.network(images).last_hidden_state)
