"""GoogLeNet, the first Inception network."""

from __future__ import annotations

from collections import OrderedDict

from jaxtyping import Float
from torch import Tensor, nn
from torchvision.models import googlenet

from unimetric.backbones._convnets import freeze_batchnorm, rest_batchnorm, tokens_of
from unimetric.backbones._layouts import recognize
from unimetric.backbones._weights import fill, read_weights
from unimetric.errors import UnimetricError


class GoogLeNet(nn.Module):
    """Going deeper with convolutions (Szegedy et al., CVPR 2015), torchvision's version: (B, 3, H, W) -> (B, 1 + N, 1024).

    N is 49 at 224 pixels and at the 227 that metric learning used with it. Differs from the paper: torchvision's has BatchNorm, and 3 x 3
    where the paper has 5 x 5. Its weights expect pixels from -1 to 1; torchvision gets there from ImageNet's statistics, we directly.

    Args:
        pretrained: fetch torchvision's weights.
        weights: a local file instead, in torchvision's layout.
        frozen_batchnorm: BatchNorm stays at its stored statistics, scale and shift (Roth et al. 2020).
        train_affine: but its scale and shift are learnt.
    """

    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)
    channels = 1024

    def __init__(self, *, pretrained: bool = False, weights: str = "", frozen_batchnorm: bool = False, train_affine: bool = False) -> None:
        super().__init__()
        if pretrained and weights:
            raise UnimetricError("both `pretrained` and `weights` are given", "keep one of them")
        state = read_weights(weights, backbone="googlenet") if weights else {}
        try:
            whole = googlenet(weights="IMAGENET1K_V1") if pretrained else googlenet(aux_logits=False, init_weights=True)
        except OSError as error:
            raise UnimetricError(
                f"torchvision cannot fetch its weights: {error}", "`weights='googlenet-1378be20.pth'` reads a local file"
            ) from None
        # torchvision lists the layers in the order of its forward pass; what stands after the last map is the classifier's.
        layers = [(name, layer) for name, layer in whole.named_children() if name.startswith(("conv", "maxpool", "inception"))]
        self.network = nn.Sequential(OrderedDict(layers))
        if weights:
            fill(self.network, state, weights, layout=recognize(state).name)
        self.frozen_batchnorm = frozen_batchnorm
        if frozen_batchnorm:
            freeze_batchnorm(self.network, affine=not train_affine)
            rest_batchnorm(self.network)

    def train(self, mode: bool = True) -> GoogLeNet:
        super().train(mode)
        if self.frozen_batchnorm:
            rest_batchnorm(self.network)
        return self

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N C"]:
        return tokens_of(self.network(images))
