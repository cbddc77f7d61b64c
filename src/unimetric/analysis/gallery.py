"""What a report shows of an embedding: some test pictures, where they lie, their neighbours, and the singular values of the whole."""

from __future__ import annotations

import io
import math
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
    """Write `gallery.npz` into a run folder. What a report shows of several runs on the same classes is the same queries and points.

    Args:
        folder: of a run with weights.
        queries: pictures whose neighbours are kept.
        neighbours: of each query, nearest first, out of all test pictures.
        points: pictures for the map, beside the queries and neighbours.
        side: of a thumbnail, in pixels.
    """
    folder = Path(folder)
    config, model = open_run(folder)
    table, split = read_table(config)
    rows = _readable(folder, table, split.test)
    test = table.take(rows)
    embeddings = embed_all(open_fabric(config), config, model, test)
    unit = torch.nn.functional.normalize(embeddings, dim=1)
    rng = np.random.default_rng(0)  # the same pictures for every run on these classes
    asks, answers = np.flatnonzero(table.query[rows]), np.flatnonzero(table.gallery[rows])
    chosen = np.sort(rng.permutation(asks)[:queries])
    others = rng.permutation(len(rows))[:points]
    some = replace(test, query=np.isin(np.arange(len(rows)), chosen))
    space = space_of(embeddings, some, np.arange(len(rows)), loss=loss_with_geometry(config, model.dim), geometry=config.geometry)
    order = space.neighbors(min(neighbours, len(answers) - 1)).cpu().numpy()
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
    """Without the pictures that training left out."""
    list_ = folder / "skipped.txt"
    lines = list_.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if list_.exists() else []
    return np.array([row for row in rows if not any(line.startswith(f"{table.paths[row]}: ") for line in lines)], np.int64)


def _shift(text: str) -> float:
    """The Frechet distance that a file of splits gives for this split; not a number if it gives none."""
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


def look_where_missing(folders: list[Path]) -> None:
    """Look at every finished run in these folders, or one level below, that has no `gallery.npz` yet."""
    for folder in [each for top in folders for each in (top, *(sorted(top.iterdir()) if top.is_dir() else ()))]:
        if (folder / "done").is_file() and (folder / "model.safetensors").is_file() and not (folder / "gallery.npz").exists():
            write_gallery(folder)
