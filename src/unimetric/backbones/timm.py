"""Any network of timm."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import timm
import torch
from jaxtyping import Float
from timm.layers import resample_abs_pos_embed
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from unimetric.arguments import Natural
from unimetric.backbones._convnets import ConvNet, tokens_of
from unimetric.backbones._hub import SOURCES, advise_weights, hub_without_waiting, resolve_weights
from unimetric.backbones._layouts import recognize, to_timm, torchvision_eps
from unimetric.backbones._weights import fill, read_weights
from unimetric.errors import UnimetricError, closest, first_line
from unimetric.foreign import stages_of


class Timm(ConvNet):
    """Last stage of any network of timm.

    Reference:
        PyTorch image models (Wightman, 2019).

    Args:
        name: Model name in timm, such as `resnet50.tv_in1k`. The tag after the dot selects the weights of
            `pretrained=True` and their image statistics. Without a tag these are timm's default,
            `a1_in1k` for `resnet50`. `hf-hub:owner/model` is a model of the Hugging Face hub, and
            `local-dir:folder` a folder with `config.json` and `model.safetensors`.
        pretrained: Whether to download the weights of timm from the hub, or to read those of the folder.
        weights: Path of a local file instead (`.safetensors`, or `.pth` with a plain state dict),
            in the layout of timm, torchvision, DINOv2, OpenAI's CLIP or Hugging Face.
        frozen_batchnorm: Whether BatchNorm keeps its stored statistics, scale and shift (Roth
            et al. 2020).
        train_affine: Whether scale and shift are trained nevertheless (as in their code).
        frozen_patches: Whether the patch embedding of a transformer is not trained, as in Hyp (Ermolov
            et al., CVPR 2022).
        stride_first: Whether the stride of a ResNet bottleneck is in its first convolution, as in
            the original Caffe release (He et al. 2015).
        image_size: Side of the images in pixels, for transformers whose position embedding must be
            resampled. 0 uses the default of the network.

    Shape:
        images (B, 3, H, W) -> tokens (B, 1 + N, C)
    """

    def __init__(
        self,
        *,
        name: str = "resnet50",
        pretrained: bool = False,
        weights: str = "",
        frozen_batchnorm: bool = False,
        train_affine: bool = False,
        frozen_patches: bool = False,
        stride_first: bool = False,
        image_size: Natural = 0,
    ) -> None:
        super().__init__()
        elsewhere = name.startswith(SOURCES)
        if not elsewhere and not timm.is_model(name):
            near = closest(name.split(".")[0], timm.list_models())
            raise UnimetricError(f"timm has no network `{name}`", near if near.startswith("did") else "see timm.list_models()")
        if pretrained and weights:
            raise UnimetricError("only one of `pretrained` and `weights` is allowed, got both", "remove one of them")
        state = read_weights(weights, backbone="timm") if weights else {}
        size: Any = {"img_size": image_size} if image_size else {}
        try:
            with hub_without_waiting() if pretrained or name.startswith("hf-hub:") else nullcontext():
                network: Any = timm.create_model(name, pretrained=pretrained, num_classes=0, **size)
        except Exception as error:  # no connection, unknown tag or argument: timm and the hub raise many types
            hint = advise_weights(name) if pretrained or elsewhere else "check `name` and `image_size`"
            raise UnimetricError(f"timm cannot create `{name}`: {type(error).__name__}: {first_line(error)}", hint) from None
        if pretrained and resolve_weights(name) != name:
            logging.getLogger("unimetric").warning("timm: the weights of `%s` are `%s`", name, resolve_weights(name))
        self.network = network
        self.channels: int = network.num_features
        self.mean, self.std = network.pretrained_cfg["mean"], network.pretrained_cfg["std"]
        # Some networks widen the pooled vector with a further layer. The global token must be as wide as
        # the others.
        self.own_summary = getattr(self.network, "head_hidden_size", self.channels) == self.channels
        # Some networks do not define the number of prefix tokens. CoaT has one class token per stage.
        tokens = [getattr(network, key, None) for key in ("cls_token", "cls_token4")]
        token = next((found for found in tokens if found is not None), None)
        self.prefix: int = getattr(network, "num_prefix_tokens", 0 if token is None else token.shape[1])
        self.channels_last = getattr(self.network, "output_fmt", "NCHW") == "NHWC"
        if stride_first:
            self._move_strides(name)
        if frozen_patches:
            self._freeze_patches(name)
        if weights:
            own = self.network.state_dict()
            fill(self.network, self._fit_positions(to_timm(state, own)), weights, layout=recognize(state).name)
            self._set_eps(torchvision_eps(state, name))
        if frozen_batchnorm:
            self.fix_batchnorm(affine=not train_affine)

    def find_transformer(self) -> Any:
        return self.network if isinstance(self.network, VisionTransformer | Eva) else None

    def find_stages(self) -> Sequence[nn.Module]:
        return stages_of(self.network)

    def _freeze_patches(self, name: str) -> None:
        patches = dict(self.network.named_children()).get("patch_embed")
        if patches is None:
            raise UnimetricError(f"`frozen_patches` requires a patch embedding, but `{name}` has none", "remove `frozen_patches`")
        patches.requires_grad_(False)

    def _move_strides(self, name: str) -> None:
        blocks: list[Any] = [m for m in self.network.modules() if "conv3" in dict(m.named_children()) and getattr(m, "stride", 1) == 2]
        if not blocks:
            raise UnimetricError(f"`stride_first` requires bottleneck blocks, but `{name}` has none", "remove `stride_first`")
        for block in blocks:
            block.conv1.stride, block.conv2.stride = (2, 2), (1, 1)

    def _fit_positions(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        own, given = getattr(self.network, "pos_embed", None), state.get("pos_embed")
        if own is None or given is None or own.shape == given.shape:
            return state
        grid = list(self.network.patch_embed.grid_size)
        own_prefix = getattr(self.network, "num_prefix_tokens", 0)  # networks without it embed positions of patches only
        prefix = 0 if getattr(self.network, "no_embed_class", False) else own_prefix
        patches = given.shape[1] - prefix if given.dim() == 3 else 0
        if patches < 1 or math.isqrt(patches) ** 2 != patches:
            return state  # not a square of patches: weights of another network, for which `fill` raises an error
        return state | {"pos_embed": resample_abs_pos_embed(given, new_size=grid, num_prefix_tokens=prefix)}

    def _set_eps(self, eps: float | None) -> None:
        for module in self.network.modules():
            if eps and isinstance(module, nn.BatchNorm2d):
                module.eps = eps

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N C"]:
        stage = self.network.forward_features(images)
        if stage.dim() == 4:
            stage = stage.permute(0, 3, 1, 2) if self.channels_last else stage
            return tokens_of(stage)
        if not self.own_summary:
            return torch.cat([stage.mean(1, keepdim=True), stage[:, self.prefix :]], 1)
        summary = self.network.forward_head(stage, pre_logits=True)
        return torch.cat([summary[:, None], stage[:, self.prefix :]], 1)
