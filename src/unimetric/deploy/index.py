"""Index: the images of a folder as vectors in a store, with the model that made them.

    index.toml          weights, transform, geometry, center and scale, store, columns, count
    model/              exported model, or the file model.onnx
    store/              vectors, ids and columns
    files.db            size, time and digest of every file
    thresholds.json     score from which two images are of one class, if it was calibrated
    unreadable.txt      files that could not be read, with the reasons

An index opens without the run that trained its model.

N images, D dimensions, Q queries.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from unimetric.arguments import local_path
from unimetric.deploy.embedding import Embedder, open_embedder, open_own
from unimetric.deploy.facts import FACTS, STORE, Facts, read_thresholds, read_unreadable
from unimetric.errors import NotFound, UnimetricError
from unimetric.images.remote import join_path
from unimetric.kinds import Store
from unimetric.runs.model import loss_with_geometry, place
from unimetric.spec import create
from unimetric.stores._points import check_count, to_matrix
from unimetric.stores._where import Filter, Where, read_filter

#: Attempts of a search while another program deletes images.
_ATTEMPTS = 5


@dataclass(frozen=True)
class Hit:
    """An image that a search has found.

    Args:
        id: Id of the image: its path in the source of the index.
        path: Path of the file.
        score: Similarity to the query: cosine, inner product, or minus the distance.
        known: Whether the score exceeds the calibrated threshold; None without one.
        columns: Values of its columns.
    """

    id: str
    path: str
    score: float
    known: bool | None = None
    columns: dict[str, Any] = field(default_factory=dict)


class Index:
    """Images as vectors in a store, with the model that made them.

    Get one with `create` or `open`.

    Args:
        path: Index folder.
        device: `auto`, `cpu` or `cuda`.

    Attributes:
        path: Index folder.
        facts: Content of its `index.toml`.
        store: Store of the vectors.
        thresholds: Content of its `thresholds.json`: `threshold`, `fpr`, `score` and more. None if it was not calibrated.
    """

    def __init__(self, path: str | Path, *, device: str = "auto") -> None:
        self.path, self.device = Path(local_path(str(path))), device
        self._embedder: Embedder | None = None
        self._store: Store | None = None
        self._load()

    def _load(self) -> None:
        self._seen = self._stamp()
        self.facts = Facts.read(self.path)
        self.thresholds = read_thresholds(self.path)

    def _stamp(self) -> tuple[int, ...]:
        """Return numbers that change when `index.toml` is replaced."""
        try:
            status = os.stat(self.path / FACTS)
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_ino, status.st_size

    @classmethod
    def create(cls, model: str | Path, source: str | Path, path: str | Path, **options: Any) -> Index:
        """Build an index, resume a build, or update an index with the same model.

        Args:
            model: Run folder, exported folder, ONNX file of `unimetric export`, or backbone spec string with pretrained weights.
            source: Folder of images at any depth, csv file with a column `path`, or dataset spec string.
            path: Index folder.
            options: Options of `deploy.building.build`: `store`, `labels`, `workers`, `progress`, and settings of a run, such as
                `device` or `transform`.

        Returns:
            The index.
        """
        from unimetric.deploy.building import build

        path = local_path(str(path))
        build(local_path(str(model)), source, Path(path), **options)
        return cls.open(path, device=str(options.get("device", "auto")))

    @classmethod
    def open(cls, path: str | Path, *, device: str = "auto") -> Index:
        """Open an index folder.

        Args:
            path: Index folder.
            device: Device of the model: `auto`, `cpu` or `cuda`. The store is searched on the CPU.
        """
        return cls(path, device=device)

    def check_complete(self) -> Index:
        """Return this index, or raise an error if its first build was interrupted.

        During an update, and after one that was killed, an index is whole.
        """
        if self.facts.state == "building":
            raise UnimetricError(f"{self.path}: its build is not complete", "run the same `unimetric index` command to resume it")
        return self

    def update(self, source: str | Path | None = None, **options: Any) -> dict[str, int]:
        """Read new and changed images of a source, and remove deleted ones.

        Args:
            source: Folder, csv file or dataset spec string. Defaults to that of the last build.
            options: Options of `deploy.building.build`: `workers`, `progress`.

        Returns:
            Numbers of images: `added`, `changed`, `deleted`, `unreadable`.
        """
        from unimetric.deploy.building import build

        result = build(None, self.facts.source if source is None else source, self.path, device=self.device, **options)
        self.refresh()
        return result

    # --- parts -------------------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """Store of the vectors, opened on first use."""
        if self._store is None:
            dim = self.facts.placement.extended(self.facts.dim)
            self._store = create("stores", self.facts.store, path=str(self.path / STORE), dim=dim)
        return self._store

    @property
    def embedder(self) -> Embedder:
        """Model of the index on its device, opened on first use."""
        if self._embedder is None:
            config, model = open_own(self.path, self.facts, {"device": self.device})
            self._loss = loss_with_geometry(config, model.dim)
            self._embedder = open_embedder(config, model)
        return self._embedder

    @property
    def version(self) -> str:
        """Text that changes when the index on disk has changed.

        `refresh` then reads the new content.
        """
        facts = self.facts if self._stamp() == self._seen else Facts.read(self.path)
        return facts.version

    def refresh(self) -> bool:
        """Read the index again if it has changed on disk. Return whether it has."""
        if self._stamp() == self._seen:
            return False
        network = self.facts.network
        self._load()
        self.close()
        if self.facts.network != network:
            self._embedder = None
        return True

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def __len__(self) -> int:
        return len(self.store)

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def columns(self) -> dict[str, type]:
        """Type of each column: str, int, float or bool."""
        return dict(self.store.columns)

    def image_path(self, id_: str) -> str:
        """Return the path of an image."""
        return join_path(self.facts.root, id_)

    def unreadable(self) -> list[tuple[str, str]]:
        """Return id and reason of every file that could not be read."""
        return read_unreadable(self.path)

    # --- search ------------------------------------------------------------------------------------------------------

    def embed(self, images: Sequence[Any]) -> Float[np.ndarray, "N D"]:
        """Return the raw embeddings of images, in float32.

        Args:
            images: Paths, images of Pillow, or arrays (H, W, 3) of uint8.
        """
        return self.embedder.embed_images(images)

    def place(self, embeddings: Float[np.ndarray, "N D"]) -> torch.Tensor:
        """Return the points of raw embeddings in the geometry of the index."""
        points = torch.from_numpy(np.ascontiguousarray(embeddings, np.float32))
        if self.facts.placement.geometry != "poincare":
            return points
        assert self.embedder  # opens the loss, which maps into the Poincaré ball
        return place(points, self._loss, "")[0]

    def find(self, where: Filter) -> Where | None:
        """Return a checked filter.

        Args:
            where: Text such as `label = 'boot' and price < 50`, a dictionary such as `{"label": "boot"}`, or None.
        """
        return read_filter(where, self.columns)

    def search_vectors(
        self, vectors: Float[np.ndarray, "Q D"], k: int = 10, where: Filter = None
    ) -> tuple[np.ndarray, Float[np.ndarray, "Q k"]]:
        """Return ids and scores of the nearest images of raw embeddings, nearest first.

        Args:
            vectors: Raw embeddings of the model of the index, as `embed` returns them.
            k: Number of images per query. If there are fewer, the id "" and the score -inf fill the rest.
            where: Filter; see `find`.
        """
        problem = f"query vectors must have the shape (Q, {self.facts.dim}) of the index's model"
        vectors = to_matrix(vectors, problem, self.facts.dim, "embed queries with the model of the index: `index.embed(images)`")
        if not np.isfinite(vectors).all() or not vectors.any(1).all():
            raise UnimetricError("query vectors must be finite and not zero", "embed an image that is not uniform")
        check_count(k)
        filter_ = self.find(where)
        points = self.place(vectors)
        placement = self.facts.placement
        if not placement.frozen:  # nothing was stored yet
            return np.full((len(points), k), "", object), np.full((len(points), k), -np.inf, np.float32)
        ids, scores = self.store.search(placement.queries(points), k, filter_)
        if placement.geometry != "cosine":
            for row, point in enumerate(points):
                some = [each for each in ids[row] if each]
                if some:
                    scores[row, : len(some)] = placement.scores(point, self.store.vectors(some))
        return ids, scores

    def search(self, images: Any, k: int = 10, where: Filter = None) -> list[Any]:
        """Return the images that are most similar to one or several queries.

        Args:
            images: A query, or a list of them: path, image of Pillow, or array (H, W, 3) of uint8.
            k: Number of images per query.
            where: Filter; see `find`.

        Returns:
            Hits of the query, nearest first, or one list of hits per query.
        """
        several = isinstance(images, list | tuple) or (isinstance(images, np.ndarray) and images.ndim == 4)
        queries = list(images) if several else [images]
        self.find(where)  # wrong arguments are reported before the model is loaded
        check_count(k)
        if not queries:
            return []
        k = min(k, max(len(self), 1))  # the arrays of a search have k columns
        vectors = self.embed(queries)
        for query, vector in zip(queries, vectors, strict=True):
            if isinstance(query, str | Path) and not (np.isfinite(vector).all() and vector.any()):
                raise UnimetricError(f"{query}: its embedding is zero or infinite", "search with an image that is not uniform")
        found = self.search_hits(vectors, k, where)
        return found if several else found[0]

    def search_hits(self, vectors: Float[np.ndarray, "Q D"], k: int = 10, where: Filter = None) -> list[list[Hit]]:
        """Return the nearest images of raw embeddings as hits.

        Arguments are those of `search_vectors`.
        """
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(NotFound):  # another program has deleted a hit before its columns were read
                return self.hits(*self.search_vectors(vectors, k, where))
        return self.hits(*self.search_vectors(vectors, k, where))

    def hits(self, ids: np.ndarray, scores: np.ndarray) -> list[list[Hit]]:
        """Return the results of `search_vectors` with paths and columns."""
        every = list(dict.fromkeys(each for row in ids for each in row if each))
        columns = self.fetch(every)
        number = {each: place for place, each in enumerate(every)}
        limit = None if self.thresholds is None else self.thresholds["threshold"]
        return [
            [
                Hit(
                    each,
                    self.image_path(each),
                    float(score),
                    None if limit is None else bool(score > limit),
                    {name: values[number[each]] for name, values in columns.items()},
                )
                for each, score in zip(row, row_scores, strict=True)
                if each
            ]
            for row, row_scores in zip(ids, scores, strict=True)
        ]

    def fetch(self, ids: Sequence[str]) -> dict[str, list[Any]]:
        """Return the columns of images, in the order of their ids."""
        return self.store.fetch(ids)


def sample_gallery(index: Index, most: int) -> tuple[list[str], Float[np.ndarray, "N D"], dict[str, list[Any]]]:
    """Return ids, points and columns of all images, or of every n-th beyond `most`."""
    step = max(1, -(-len(index) // most))
    ids: list[str] = []
    parts: list[np.ndarray] = []
    columns: dict[str, list[Any]] = {name: [] for name in index.columns}
    seen = 0
    for some, vectors, values in index.store.scan():
        chosen = slice(-seen % step, None, step)
        ids += some[chosen]
        parts.append(vectors[chosen].copy())  # a view would hold the vectors in between
        for name, held in columns.items():
            held += values.get(name, [None] * len(some))[chosen]
        seen += len(some)
    points = index.facts.placement.points(np.concatenate(parts)) if ids else np.zeros((0, index.facts.dim), np.float32)
    return ids, points, columns
