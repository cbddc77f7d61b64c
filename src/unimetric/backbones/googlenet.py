"""GoogLeNet, the first Inception network."""

from __future__ import annotations

from collections import OrderedDict

from jaxtyping import Float
from torch import Tensor, nn
from torchvision.models import googlenet

from unimetric.backbones._convnets import ConvNet, tokens_of
from unimetric.backbones._layouts import recognize
from unimetric.backbones._weights import fill, read_weights
from unimetric.errors import UnimetricError


class GoogLeNet(ConvNet):
    """GoogLeNet in the version of torchvision.

    The network also accepts the 227 pixels common in metric learning.

    Differs from the paper:
        torchvision adds BatchNorm, and has 3 x 3 convolutions instead of 5 x 5. Its weights expect
        pixels from -1 to 1. torchvision converts from the statistics of ImageNet; this backbone
        sets that range directly.

    Reference:
        Going deeper with convolutions (Szegedy et al., CVPR 2015).

    Args:
        pretrained: Whether to download the weights of torchvision.
        weights: Path of a local file instead, in the layout of torchvision.
        frozen_batchnorm: Whether BatchNorm keeps its stored statistics, scale and shift (Roth
            et al. 2020).
        train_affine: Whether scale and shift are trained nevertheless.

    Shape:
        images (B, 3, H, W) -> tokens (B, 1 + N, 1024), N = 49 at 224 and 227 pixels
    """

    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)
    channels = 1024

    def __init__(self, *, pretrained: bool = False, weights: str = "", frozen_batchnorm: bool = False, train_affine: bool = False) -> None:
        super().__init__()
        if pretrained and weights:
            raise UnimetricError("only one of `pretrained` and `weights` is allowed, got both", "remove one of them")
        state = read_weights(weights, backbone="googlenet") if weights else {}
        try:
            whole = googlenet(weights="IMAGENET1K_V1") if pretrained else googlenet(aux_logits=False, init_weights=True)
        except OSError as error:
            raise UnimetricError(
                f"torchvision cannot download its weights: {error}", "use a local file with `weights='googlenet-1378be20.pth'`"
            ) from None
        # torchvision lists the layers in the order of its forward pass. Layers after the last map belong
        # to the classifier.
        layers = [(name, layer) for name, layer in whole.named_children() if name.startswith(("conv", "maxpool", "inception"))]
        self.network = nn.Sequential(OrderedDict(layers))
        if weights:
            fill(self.network, state, weights, layout=recognize(state).name)
        if frozen_batchnorm:
            self.fix_batchnorm(affine=not train_affine)

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N C"]:
        return tokens_of(self.network(images))
