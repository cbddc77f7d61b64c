"""Heat maps of a run's prototypes over images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unimetric.analysis.canvas import Canvas
from unimetric.errors import UnimetricError
from unimetric.images.loading import Streamed, View
from unimetric.images.table import Table
from unimetric.runs.device import open_fabric
from unimetric.runs.folder import open_run
from unimetric.spec import create


def explain(
    run: str | Path, images: Sequence[str | Path], *, out: str | Path, prototypes: Sequence[int] = (), count: int = 8
) -> list[tuple[int, float]]:
    """Draw heat maps of prototypes over images.

    Each row shows an image as the backbone receives it, then one map per prototype: the weight log(1 + exp(x_j . c_k)) at each
    spatial position. The colors of each map cover its own range, from blue to red.

    Reference:
        Figure 2 of Coded residual transform for generalizable deep metric learning (Kan et al., NeurIPS 2022).

    Args:
        run: Run folder whose head has prototypes.
        images: Image files, or rows of a pack as `FILE.pack::ROW`.
        out: Output file.
        prototypes: Prototype indices. Defaults to those with the largest weight over all images.
        count: Number of prototypes, if `prototypes` is empty.

    Returns:
        Index and mean weight of each prototype.
    """
    if Path(out).suffix.lower() not in (".png", ".jpg", ".jpeg", ".pdf", ".svg"):
        raise UnimetricError(f"`--out` must end in .png, .jpg, .pdf or .svg, got {out}", "use `--out explain.png`")
    if not Path(out).absolute().parent.is_dir():
        raise UnimetricError(f"{out}: the folder {Path(out).parent} does not exist", "create it, or choose another --out")
    if not images:
        raise UnimetricError("`explain` requires at least one image", "write `unimetric explain RUN IMAGE`")
    for image in images:
        if "::" not in str(image) and not Path(image).is_file():
            raise UnimetricError(f"{image}: no such image", "name image files, or rows of a pack as `FILE.pack::ROW`")
    config, model = open_run(run)
    if not model.head.prototype_sets:
        raise UnimetricError(f"{run}: the head `{config.head}` has no prototypes", 'train one with `head = "crt"`')
    fabric = open_fabric(replace(config, device="auto"))  # the device of this machine, not that of training
    model = model.to(fabric.device).eval()
    names = tuple(str(image) for image in images)
    zeros = np.zeros(len(names), np.int64)
    table = Table(paths=names, labels=zeros, class_names=("",), train=zeros)
    source = Streamed(table, device=fabric.device, mean=model.mean, std=model.std, workers=0)
    view = View(create("transforms", config.transform))
    with torch.inference_mode():
        crops = next(source.load([(np.arange(len(names)), view)]))
        maps = model.head.maps(model.backbone(crops)).float().cpu()  # (B, K, N)
        shown = (crops * source.std + source.mean).clamp(0, 1).permute(0, 2, 3, 1).cpu().numpy()
    strength = maps.mean((0, 2))
    chosen = list(prototypes) or strength.topk(min(count, len(strength))).indices.tolist()
    for number in chosen:
        if not 0 <= number < len(strength):
            raise UnimetricError(
                f"{run}: prototype indices must be between 0 and {len(strength) - 1}, got {number}", "use `--prototypes 0`"
            )
    _draw(shown, heat(maps[:, chosen], shown.shape[1]).numpy(), [_short(Path(name).name) for name in names], chosen, Path(out))
    return [(number, float(strength[number])) for number in chosen]


def heat(maps: Float[Tensor, "B K N"], size: int) -> Float[Tensor, "B K S S"]:
    """Interpolate weights on a square grid of N positions to `size` pixels per side."""
    side = math.isqrt(maps.shape[-1])
    if side * side != maps.shape[-1]:
        raise UnimetricError(
            f"the backbone must have a square grid of positions, got {maps.shape[-1]} positions", "use a run with square images"
        )
    return torch.nn.functional.interpolate(maps.unflatten(-1, (side, side)), size=(size, size), mode="bilinear", align_corners=False)


def _short(name: str) -> str:
    """Shorten a file name to the width of a column, 18 characters, by removing its start."""
    return name if len(name) <= 18 else f"...{name[-15:]}"


def _draw(shown: Any, maps: Any, names: list[str], chosen: list[int], out: Path) -> None:
    rows, columns = len(names), 1 + len(chosen)
    with Canvas(out, width=1.6 * columns, height=1.6 * rows + 0.3, rows=rows, columns=columns) as axes:
        for row in range(rows):
            for column in range(columns):
                axis = axes[row, column]
                axis.set_axis_off()
                axis.imshow(shown[row])
                if column:
                    axis.imshow(maps[row, column - 1], cmap="turbo", alpha=0.5)
                if row == 0 or column == 0:
                    axis.set_title(names[row] if column == 0 else f"prototype {chosen[column - 1]}", fontsize=7)
