"""One file a backbone: `backbone(images (B, 3, H, W)) -> tokens (B, 1 + N, C)`.

The first token is the network's own summary of the picture: the class token of a transformer, the mean over the map of a
convolutional network. The others are the positions of its last stage. So one linear head fits all of them, and a head that wants
the map has it. A backbone says `channels` (C), and `mean` and `std` of the pictures it was trained on.
"""

from __future__ import annotations

from unimetric.backbones._convnets import IMAGENET_MEAN, IMAGENET_STD, freeze_batchnorm, rest_batchnorm, tokens_of
from unimetric.backbones._weights import fill, read_weights

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "fill", "freeze_batchnorm", "read_weights", "rest_batchnorm", "tokens_of"]
