"""Packs of made-up images, for benchmarks that need no dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from unimetric.images import packing
from unimetric.images.table import Table


def noise(height: int, width: int) -> list[np.ndarray]:
    """Return sixteen images of random pixels."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(16)]


def smooth(height: int, width: int) -> list[np.ndarray]:
    """Return sixteen images without fine detail, which JPEG stores in few bytes, like photos."""
    coarse = torch.rand(16, 3, 40, 50, generator=torch.Generator().manual_seed(0))
    fine = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    return list(fine.clamp(0, 1).mul(255).byte().permute(0, 2, 3, 1).numpy())


def made_up_pack(path: Path, few: list[np.ndarray], *, count: int, test_classes: int = 4, encoding: str = "raw") -> None:
    """Write a pack that repeats a few images, in classes of 20."""
    labels = np.arange(count) % (count // 20)
    table = Table(
        paths=tuple(map(str, range(count))),
        labels=labels,
        class_names=tuple(f"c{number}" for number in range(count // 20)),
        train=labels >= test_classes,
        source_names=("made up",),
    )
    packing.write(path, table, short_side=None, encoding=encoding, quality=90, read=lambda name: few[int(name) % len(few)])
