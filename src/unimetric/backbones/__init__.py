"""One file per backbone: `backbone(images (B, 3, H, W)) -> tokens (B, 1 + N, C)`.

The first token is the global token of the image: the class token of a transformer, or the mean of the
feature map of a convolutional network. The others are the spatial positions of the last stage. The
interface is `kinds.Backbone`.
"""

from __future__ import annotations

from unimetric.spec import catalogue

catalogue(
    __name__,
    IMAGENET_MEAN="unimetric.backbones._convnets",
    IMAGENET_STD="unimetric.backbones._convnets",
    fill="unimetric.backbones._weights",
    freeze_batchnorm="unimetric.backbones._convnets",
    read_weights="unimetric.backbones._weights",
    rest_batchnorm="unimetric.backbones._convnets",
    tokens_of="unimetric.backbones._convnets",
)
