"""What each prototype of a run looks at, drawn over pictures."""

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
    run: str | Path, pictures: Sequence[str | Path], *, out: str | Path, prototypes: Sequence[int] = (), count: int = 8
) -> list[tuple[int, float]]:
    """Heat maps of prototypes over pictures, as in figure 2 of the coded residual transform (Kan et al., NeurIPS 2022).

    One row a picture: as the backbone sees it, then the weight log(1 + exp(x_j . c_k)) of each prototype at each position, every map
    in the colours of its own range, from blue to red.

    Args:
        run: a run folder whose head has prototypes.
        pictures: files, or `FILE.pack::ROW`.
        out: the picture to write.
        prototypes: their numbers; default those with the largest weight over all the pictures.
        count: how many of these.

    Returns:
        each prototype drawn, and its mean weight over the pictures.
    """
    if Path(out).suffix.lower() not in (".png", ".jpg", ".jpeg", ".pdf", ".svg"):
        raise UnimetricError(f"{out}: not the name of a picture", "end it in .png, .jpg, .pdf or .svg")
    if not Path(out).absolute().parent.is_dir():
        raise UnimetricError(f"{out}: there is no folder {Path(out).parent}", "make it first, or name another place")
    if not pictures:
        raise UnimetricError("no picture to explain", "name one picture at least: `unimetric explain RUN IMAGE`")
    for picture in pictures:
        if "::" not in str(picture) and not Path(picture).is_file():
            raise UnimetricError(f"{picture}: no such picture", "name image files, or rows of a pack as `FILE.pack::ROW`")
    config, model = open_run(run)
    if not getattr(model.head, "prototype_sets", ()):
        raise UnimetricError(f"{run}: its head `{config.head}` has no prototypes to show", 'train one with `head = "crt"`')
    fabric = open_fabric(replace(config, device="auto"))  # wherever this is, not where it was trained
    model = model.to(fabric.device).eval()
    names = tuple(str(picture) for picture in pictures)
    nowhere = np.zeros(len(names), np.int64)
    table = Table(paths=names, labels=nowhere, class_names=("",), train=nowhere)
    source = Streamed(table, device=fabric.device, mean=model.mean, std=model.std, workers=0)
    look = View(create("transforms", config.transform))
    with torch.inference_mode():
        squares = next(source.load([(np.arange(len(names)), look)]))
        maps = model.head.maps(model.backbone(squares)).float().cpu()  # (B, K, N)
        shown = (squares * source.std + source.mean).clamp(0, 1).permute(0, 2, 3, 1).cpu().numpy()
    strength = maps.mean((0, 2))
    chosen = list(prototypes) or strength.topk(min(count, len(strength))).indices.tolist()
    for number in chosen:
        if not 0 <= number < len(strength):
            raise UnimetricError(f"{run}: there is no prototype {number}", f"prototypes are numbered from 0 to {len(strength) - 1}")
    _draw(shown, heat(maps[:, chosen], shown.shape[1]).numpy(), [_short(Path(name).name) for name in names], chosen, Path(out))
    return [(number, float(strength[number])) for number in chosen]


def heat(maps: Float[Tensor, "B K N"], size: int) -> Float[Tensor, "B K S S"]:
    """Weights at N positions, which are a square in rows, spread smoothly over a picture of that side."""
    side = math.isqrt(maps.shape[-1])
    if side * side != maps.shape[-1]:
        raise UnimetricError(f"the backbone's {maps.shape[-1]} positions are no square", "explain a run whose pictures are square")
    return torch.nn.functional.interpolate(maps.unflatten(-1, (side, side)), size=(size, size), mode="bilinear", align_corners=False)


def _short(name: str, most: int = 18) -> str:
    """What fits over a column: the end of a long name, where pictures differ."""
    return name if len(name) <= most else f"...{name[3 - most :]}"


def _draw(shown: Any, maps: Any, names: list[str], chosen: list[int], out: Path) -> None:
    rows, columns = len(names), 1 + len(chosen)
    with Canvas(out, width=1.6 * columns, height=1.6 * rows + 0.3, rows=rows, columns=columns) as axes:
        for row in range(rows):
            for column in range(columns):
                place = axes[row, column]
                place.set_axis_off()
                place.imshow(shown[row])
                if column:
                    place.imshow(maps[row, column - 1], cmap="turbo", alpha=0.5)
                if row == 0 or column == 0:
                    place.set_title(names[row] if column == 0 else f"prototype {chosen[column - 1]}", fontsize=7)
