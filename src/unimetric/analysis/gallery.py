"""The gallery of a run for the report: images, neighbors and singular values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unimetric.analysis.classes import results_by_class
from unimetric.errors import UnimetricError
from unimetric.files import write_arrays
from unimetric.images.pack import make_thumbnail
from unimetric.images.table import Table
from unimetric.runs.device import open_fabric
from unimetric.runs.embed import embed_all, space_of
from unimetric.runs.folder import check_own_images, open_run
from unimetric.runs.model import loss_with_geometry
from unimetric.runs.rows import read_table
from unimetric.splits.ood import distance_of


def write_gallery(folder: str | Path, *, queries: int = 8, neighbours: int = 6, points: int = 300, side: int = 96) -> Path:
    """Write `gallery.npz` into a run folder.

    Runs on the same classes use the same queries and points. The file also has the recall@1 of every test class, and the paths of
    the images, which the report does not show.

    Args:
        folder: Run folder with weights.
        queries: Number of queries.
        neighbours: Number of neighbors per query among all test images, nearest first.
        points: Number of images for the map, in addition to the queries and neighbors.
        side: Longest side of the thumbnail of a query or neighbor, in pixels. Those of the map are half as large.

    Returns:
        Path of the file.
    """
    folder = Path(folder)
    config, model = open_run(folder)
    table, split = read_table(config)
    rows = _readable(folder, table, split.test)
    check_own_images(folder, config, table, {"test": rows})
    test = table.take(rows)
    embeddings = embed_all(open_fabric(config), config, model, test)
    unit = torch.nn.functional.normalize(embeddings, dim=1)
    rng = np.random.default_rng(0)  # the same images for every run on these classes
    candidates, gallery = np.flatnonzero(table.query[rows]), np.flatnonzero(table.gallery[rows])
    chosen = np.sort(rng.permutation(candidates)[:queries])
    others = rng.permutation(len(rows))[:points]
    some = replace(test, query=np.isin(np.arange(len(rows)), chosen))
    every, loss = np.arange(len(rows)), loss_with_geometry(config, model.dim)
    names = [table.class_names[label] for label in test.labels]
    classes = results_by_class(space_of(embeddings, test, every, loss=loss, geometry=config.geometry), names)
    space = space_of(embeddings, some, every, loss=loss, geometry=config.geometry)
    near, scores = space.neighbors(min(neighbours, len(gallery) - 1), scores=True)
    found = int((near >= 0).sum(1).min())  # the group rule may leave some queries fewer
    order, scores = near[:, :found].cpu().numpy(), scores[:, :found]
    kept = np.unique(np.concatenate([chosen, order.ravel(), others]))
    large = np.isin(kept, np.concatenate([chosen, order.ravel()]))  # images of the map alone stay small, as does the report
    thumbnails = [make_thumbnail(test.paths[row], side if each else side // 2, 70) for row, each in zip(kept, large, strict=True)]
    path = folder / "gallery.npz"
    write_arrays(
        path,
        compressed=True,
        embeddings=unit[kept].cpu().numpy().astype(np.float16),
        labels=table.labels[rows[kept]],
        names=np.array(names)[kept],
        source=np.array(table.source_names),
        shift=np.array(distance_of(config.split)),
        default=np.array(np.array_equal(np.sort(split.test), np.flatnonzero(~table.train))),
        queries=np.searchsorted(kept, chosen),
        neighbours=np.searchsorted(kept, order),
        scores=scores.cpu().numpy().astype(np.float32),
        paths=np.array([test.paths[row] for row in kept]),
        **_class_arrays(classes),
        spectrum=space.spectrum().cpu().numpy().astype(np.float32),
        thumbnails=np.frombuffer(b"".join(thumbnails), np.uint8),
        ends=np.cumsum([len(each) for each in thumbnails]),
    )
    return path


def _class_arrays(classes: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {
        "class_names": np.array([each["class"] for each in classes], np.str_),
        "class_recall": np.array([each["recall"] for each in classes], np.float32),
        "class_queries": np.array([each["queries"] for each in classes], np.int64),
        "class_confused": np.array([each["confused_with"] for each in classes], np.str_),
    }


def _readable(folder: Path, table: Table, rows: np.ndarray) -> np.ndarray:
    """Return the rows without the images that training skipped."""
    list_ = folder / "skipped.txt"
    lines = list_.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if list_.exists() else []
    return np.array([row for row in rows if not any(line.startswith(f"{table.paths[row]}: ") for line in lines)], np.int64)


def write_missing_galleries(folders: list[Path]) -> list[tuple[Path, str]]:
    """Write the missing `gallery.npz` of finished runs in these folders or one level below.

    Args:
        folders: Run folders, or folders of run folders.

    Returns:
        Folders of runs that cannot be read, with the reason.
    """
    failed = []
    for folder in _with_subfolders(folders):
        if (folder / "done").is_file() and (folder / "model.safetensors").is_file() and not (folder / "gallery.npz").exists():
            try:
                write_gallery(folder)
            except UnimetricError as error:
                failed.append((folder, f"no images: {error.message}"))
    return failed


def _with_subfolders(folders: list[Path]) -> Iterator[Path]:
    for folder in folders:
        yield folder
        if folder.is_dir():
            yield from sorted(folder.iterdir())
