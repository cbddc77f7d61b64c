"""Mix Transformer: encoder of SegFormer and backbone of the coded residual transform."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from jaxtyping import Float
from torch import Tensor, nn

from unimetric.arguments import Range
from unimetric.backbones._convnets import IMAGENET_MEAN, IMAGENET_STD, tokens_of
from unimetric.backbones._layouts import recognize, to_segformer
from unimetric.backbones._weights import fill, read_weights
from unimetric.errors import UnimetricError, first_line
from unimetric.kinds import Backbone

_DEPTHS = {"b0": (2, 2, 2, 2), "b1": (2, 2, 2, 2), "b2": (3, 4, 6, 3), "b3": (3, 4, 18, 3), "b4": (3, 8, 27, 3), "b5": (3, 6, 40, 3)}


class Mit(Backbone):
    """Encoder MiT-B0 to B5 of SegFormer, from transformers.

    Four stages of overlapping patches. At 227 pixels, their maps are 57, 29, 15 and 8 wide. Tokens
    are taken after the last LayerNorm. The global token is their mean, the input of the ImageNet
    classifier.

    Differs from transformers:
        The LayerNorms around attention, Mix-FFN and stages have eps 1e-6, as in the original code,
        not 1e-5.

    Reference:
        SegFormer: simple and efficient design for semantic segmentation with transformers (Xie
        et al., NeurIPS 2021).

    Args:
        name: Variant, `b0` to `b5`.
        pretrained: Whether to download the ImageNet weights `nvidia/mit-b..` from the hub.
        weights: Path of a local file instead, in the original layout or that of Hugging Face.
        drop_path: Probability of skipping the deepest block in training. Earlier blocks are skipped
            less, in proportion.

    Shape:
        images (B, 3, H, W) -> tokens (B, 1 + N, C), N = 64 at 227 pixels and 49 at 224; C = 512,
        256 for B0
    """

    mean = IMAGENET_MEAN
    std = IMAGENET_STD

    def __init__(
        self,
        *,
        name: Literal["b0", "b1", "b2", "b3", "b4", "b5"] = "b1",
        pretrained: bool = False,
        weights: str = "",
        drop_path: Annotated[float, Range(0, below=1)] = 0.1,
    ) -> None:
        super().__init__()
        if pretrained and weights:
            raise UnimetricError("only one of `pretrained` and `weights` is allowed, got both", "remove one of them")
        try:
            from transformers import SegformerConfig, SegformerModel
        except ImportError:
            raise UnimetricError("`mit` needs the package transformers", "pip install 'unimetric[mit]'") from None
        state = read_weights(weights, backbone="mit") if weights else {}
        widths = (32, 64, 160, 256) if name == "b0" else (64, 128, 320, 512)
        config = SegformerConfig(depths=_DEPTHS[name], hidden_sizes=widths, drop_path_rate=drop_path)
        try:
            network: Any = SegformerModel.from_pretrained(f"nvidia/mit-{name}", config=config) if pretrained else SegformerModel(config)
        except Exception as error:  # transformers and the hub raise many types
            raise UnimetricError(
                f"transformers cannot create `nvidia/mit-{name}`: {type(error).__name__}: {first_line(error)}",
                "`pretrained=True` needs a connection to the hub; use `weights='file.safetensors'` for a local file",
            ) from None
        for module_name, module in network.named_modules():
            if isinstance(module, nn.LayerNorm) and "attention" not in module_name and "patch_embeddings" not in module_name:
                module.eps = 1e-6
        if weights:
            fill(network, to_segformer(state, network.state_dict()), weights, layout=recognize(state).name)
        self.network = network
        self.channels: int = widths[-1]

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N C"]:
        return tokens_of(self.network(images).last_hidden_state)
