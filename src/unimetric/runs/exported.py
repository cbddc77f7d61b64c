"""Exported models: the module that formats write, and files that are evaluated like a run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.config import RunConfig, from_settings
from unimetric.errors import UnimetricError
from unimetric.images.crops import center_crop
from unimetric.images.loading import Progress
from unimetric.images.pack import decode, map_in_order
from unimetric.images.recipe import Recipe
from unimetric.images.table import Table
from unimetric.kinds import Embed
from unimetric.runs.folder import overridden
from unimetric.spec import create, declaration, names


class Exportable(nn.Module):
    """Model of a run with its test transform: pixels in, embeddings out.

    Args:
        model: Model of `build_model`.
        recipe: Transform of the run.
        normalize: Whether the embeddings get unit length. The cosine does not depend on it.

    Shape:
        uint8 images (B, H, W, 3) -> (B, D) in float32
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: Any, recipe: Recipe, *, normalize: bool = True) -> None:
        super().__init__()
        self.model, self.recipe, self.normalize = model, recipe, normalize
        self.register_buffer("mean", torch.tensor(model.mean).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(model.std).view(1, 3, 1, 1))

    def forward(self, images: Int[Tensor, "B H W 3"]) -> Float[Tensor, "B D"]:
        embeddings = self.model(center_crop(images, self.mean, self.std, self.recipe))[0]
        return nn.functional.normalize(embeddings) if self.normalize else embeddings

    @torch.inference_mode()
    def embed(self, images: np.ndarray) -> np.ndarray:
        """Embed an array of images, as the function of a format does."""
        return self(torch.from_numpy(images)).numpy()


def format_of(path: str | Path) -> str:
    """Return the format of a file by its suffix, or "" if no format writes such files.

    >>> format_of("mine.onnx"), format_of("runs/mine")
    ('onnx', '')
    """
    suffix = Path(path).suffix
    return next((name for name in names("formats") if suffix and declaration("formats", name).members.get("suffix") == suffix), "")


@dataclass(frozen=True)
class Exported:
    """Model of an exported file.

    Args:
        path: File.
        function: Function that embeds images.
        notes: What the file stores about its run.
    """

    path: Path
    function: Embed
    notes: dict[str, Any]

    @property
    def dim(self) -> int:
        """Embedding dimension."""
        return int(self.notes["dim"])

    @property
    def digest(self) -> str:
        """SHA-256 of the file."""
        with open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def open_exported(path: str | Path, overrides: Mapping[str, Any] | None = None) -> tuple[RunConfig, Exported]:
    """Open an exported file: the settings of its run, and its model.

    Args:
        path: File of a format that has a suffix.
        overrides: Settings that replace those of the run, such as `dataset`.
    """
    for key in ("backbone", "adapter", "head", "transform"):
        if key in (overrides or {}):
            raise UnimetricError(f"{path}: contains its `{key}`, which cannot be replaced", f"remove `{key}`, or use the run folder")
    function, notes = create("formats", format_of(path)).read(Path(path))
    try:
        config = from_settings(dict(notes["settings"]), str(path))
        model = Exported(Path(path), function, notes | {"dim": int(notes["dim"])})
    except (KeyError, TypeError, ValueError):
        raise UnimetricError(f"{path}: its notes have no settings of a run", "export the run again") from None
    return (overridden(config, dict(overrides), path) if overrides else config), model


#: Images that are decoded at once. Those of one size are embedded together.
WINDOW = 256


def embed_files(
    function: Embed, table: Table, *, workers: int = 2, batch: int = 32, progress: Progress | None = None
) -> Float[Tensor, "N D"]:
    """Embed whole images, in batches of one size.

    Args:
        function: Function of a format.
        table: Table of the images.
        workers: Number of threads that decode.
        batch: Largest number of images at once.
        progress: Callback with (finished images, all images).

    Returns:
        The embeddings of all rows, in their order.
    """
    found: dict[int, np.ndarray] = {}
    for start in range(0, len(table), WINDOW):
        images = map_in_order(decode, table.paths[start : start + WINDOW], max(1, workers))
        groups: dict[tuple[int, ...], list[tuple[int, np.ndarray]]] = {}
        for row, image in enumerate(images, start):
            groups.setdefault(image.shape, []).append((row, image))
        for group in groups.values():
            for first in range(0, len(group), batch):
                some = group[first : first + batch]
                vectors = function(np.stack([image for _, image in some]))
                found |= {row: vector for (row, _), vector in zip(some, vectors, strict=True)}
                if progress is not None:
                    progress(len(found), len(table))
    return torch.from_numpy(np.stack([found[row] for row in range(len(table))]))
