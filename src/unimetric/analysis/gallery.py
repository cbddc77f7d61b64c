"""The gallery of a run for the report: images, neighbors and singular values."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from unimetric.errors import UnimetricError
from unimetric.files import write_arrays
from unimetric.images.pack import decode
from unimetric.images.table import Table
from unimetric.runs.device import open_fabric
from unimetric.runs.embed import embed_all, space_of
from unimetric.runs.folder import open_run
from unimetric.runs.model import loss_with_geometry
from unimetric.runs.rows import read_table
from unimetric.splits.ood import distances, place_of


def write_gallery(folder: str | Path, *, queries: int = 8, neighbours: int = 6, points: int = 300, side: int = 48) -> Path:
    """Write `gallery.npz` into a run folder.

    Runs on the same classes use the same queries and points.

    Args:
        folder: Run folder with weights.
        queries: Number of queries.
        neighbours: Number of neighbors per query among all test images, nearest first.
        points: Number of images for the map, in addition to the queries and neighbors.
        side: Longest side of a thumbnail, in pixels.

    Returns:
        Path of the file.
    """
    folder = Path(folder)
    config, model = open_run(folder)
    table, split = read_table(config)
    rows = _readable(folder, table, split.test)
    test = table.take(rows)
    embeddings = embed_all(open_fabric(config), config, model, test)
    unit = torch.nn.functional.normalize(embeddings, dim=1)
    rng = np.random.default_rng(0)  # the same images for every run on these classes
    candidates, gallery = np.flatnonzero(table.query[rows]), np.flatnonzero(table.gallery[rows])
    chosen = np.sort(rng.permutation(candidates)[:queries])
    others = rng.permutation(len(rows))[:points]
    some = replace(test, query=np.isin(np.arange(len(rows)), chosen))
    space = space_of(embeddings, some, np.arange(len(rows)), loss=loss_with_geometry(config, model.dim), geometry=config.geometry)
    order = space.neighbors(min(neighbours, len(gallery) - 1)).cpu().numpy()
    kept = np.unique(np.concatenate([chosen, order.ravel(), others]))
    thumbnails = [_thumbnail(table.paths[row], side) for row in rows[kept]]
    path = folder / "gallery.npz"
    write_arrays(
        path,
        compressed=True,
        embeddings=unit[kept].cpu().numpy().astype(np.float16),
        labels=table.labels[rows[kept]],
        names=np.array([table.class_names[label] for label in table.labels[rows[kept]]]),
        source=np.array(table.source_names),
        shift=np.array(_shift(config.split)),
        queries=np.searchsorted(kept, chosen),
        neighbours=np.searchsorted(kept, order),
        spectrum=space.spectrum().cpu().numpy().astype(np.float32),
        thumbnails=np.frombuffer(b"".join(thumbnails), np.uint8),
        ends=np.cumsum([len(each) for each in thumbnails]),
    )
    return path


def _readable(folder: Path, table: Table, rows: np.ndarray) -> np.ndarray:
    """Return the rows without the images that training skipped."""
    list_ = folder / "skipped.txt"
    lines = list_.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if list_.exists() else []
    return np.array([row for row in rows if not any(line.startswith(f"{table.paths[row]}: ") for line in lines)], np.int64)


def _shift(text: str) -> float:
    """Return the Frechet distance of a split in its file of splits, or NaN if there is none."""
    place = place_of(text)
    with suppress(UnimetricError):
        return distances(place[0]).get(place[1], math.nan) if place else math.nan
    return math.nan


def _thumbnail(path: str, side: int) -> bytes:
    image = Image.fromarray(decode(path))
    image.thumbnail((side, side))
    out = io.BytesIO()
    image.convert("RGB").save(out, "JPEG", quality=70)
    return out.getvalue()


def write_missing_galleries(folders: list[Path]) -> None:
    """Write the missing `gallery.npz` of finished runs in these folders or one level below."""
    for folder in _with_subfolders(folders):
        if (folder / "done").is_file() and (folder / "model.safetensors").is_file() and not (folder / "gallery.npz").exists():
            write_gallery(folder)


def _with_subfolders(folders: list[Path]) -> Iterator[Path]:
    for folder in folders:
        yield folder
        if folder.is_dir():
            yield from sorted(folder.iterdir())
