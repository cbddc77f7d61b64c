"""Exact search in a gallery that is divided among the workers of a Ray cluster.

Each worker holds a shard of the gallery and returns its best items. The shards are merged in order, and equal scores go to the
lower column, so the result is that of `geometry.nearest`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.deploy.sharding import Cluster
from unimetric.errors import UnimetricError, first_line
from unimetric.geometry.barred import Barred
from unimetric.geometry.nearest import merge_best, nearest
from unimetric.geometry.space import Space

#: Queries that are sent at a time. Two such blocks are under way.
_QUERIES = 4096
#: Columns by whose multiples the gallery is divided. Products of matrices round each column alike only within whole vectors.
_ALIGNED = 64


class ShardedGallery:
    """Gallery of which each worker holds a shard.

    A lost worker is replaced up to three times, and reads its shard again. The workers end with the last reference to this object.

    Args:
        points: (G, D) points, of which this process keeps a copy in the object store of Ray.
        cluster: Cluster, and its number of workers.
    """

    def __init__(self, points: Float[Tensor, "G D"], cluster: Cluster) -> None:
        self.ray, workers = cluster.connect()
        size = -(-len(points) // (workers * _ALIGNED)) * _ALIGNED
        self.starts = list(range(0, len(points), size))
        self.sizes = [min(size, len(points) - start) for start in self.starts]
        worker = self.ray.remote(num_gpus=cluster.gpus, num_cpus=cluster.cpus, max_restarts=3, max_task_retries=3)(GalleryShard)
        # A worker that replaces a lost one reads its shard again, so the references are kept.
        self.shards = [self.ray.put(points[start : start + size].cpu().numpy()) for start in self.starts]
        self.workers = [worker.remote(shard, gpu=cluster.gpus > 0) for shard in self.shards]

    def nearest(
        self, asking: Float[Tensor, "Q D"], k: int, *, own: Int[Tensor, "Q"] | None = None, barred: Barred | None = None
    ) -> Iterator[tuple[int, Float[Tensor, "R K"], Int[Tensor, "R K"]]]:
        """Yield the k best columns of some queries at a time, as `geometry.nearest` does.

        Args:
            asking: Query points.
            k: Number of neighbors, at most G.
            own: Column of the row itself, which it must not find. -1 if there is none.
            barred: Further columns that a row must not find.
        """
        ahead = self._submit(asking, 0, k, own, barred)
        for top in range(0, len(asking), _QUERIES):
            tasks, ahead = ahead, self._submit(asking, top + _QUERIES, k, own, barred) if top + _QUERIES < len(asking) else []
            try:
                parts = [(torch.tensor(value), torch.tensor(column)) for value, column in self.ray.get(tasks)]
            except self.ray.exceptions.RayError as error:
                raise UnimetricError(f"a worker of the gallery was lost: {first_line(error)}", "run the same command again") from None
            values, columns = parts[0]
            for start, part in zip(self.starts[1:], parts[1:], strict=True):
                values, columns = merge_best((values, columns), part, start, k)
            yield top, values, columns.masked_fill(values == -torch.inf, -1)

    def _submit(self, asking: Tensor, top: int, k: int, own: Tensor | None, barred: Barred | None) -> list[Any]:
        """Send a block of queries to all workers."""
        rows = slice(top, top + _QUERIES)
        block = self.ray.put(asking[rows].cpu().numpy())
        tasks = []
        for worker, start, size in zip(self.workers, self.starts, self.sizes, strict=True):
            self_columns = None if own is None else (own[rows] - start).cpu().numpy()
            codes = None if barred is None else (barred.rows[rows].cpu().numpy(), barred.columns[start : start + size].cpu().numpy())
            tasks.append(worker.search.remote(block, min(k, size), self_columns, codes))
        return tasks


class ShardedSpace(Space):
    """Space whose gallery is divided among the workers of a cluster.

    Args:
        cluster: Cluster, and its number of workers.
        arguments: Arguments of `Space`.
    """

    def __init__(self, cluster: Cluster, *arguments: Any, **options: Any) -> None:
        self.cluster = cluster
        self.sharded: ShardedGallery | None = None
        super().__init__(*arguments, **options)

    def _find(self, ask: Tensor, answer: Tensor, k: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        if self.sharded is None:  # the gallery is the same for all metrics
            self.sharded = ShardedGallery(answer, self.cluster)
        yield from self.sharded.nearest(ask, k, own=self.own, barred=self.barred)


# --- in a worker -------------------------------------------------------------------------------------------------------


class GalleryShard:
    """Shard of a gallery, in the memory of a worker or of its GPU.

    Args:
        points: Points of the shard.
        gpu: Whether the worker has a GPU.
    """

    def __init__(self, points: np.ndarray, *, gpu: bool) -> None:
        self.points = _tensor(points).to("cuda" if gpu else "cpu")

    def search(
        self, asking: np.ndarray, k: int, own: np.ndarray | None, codes: tuple[np.ndarray, np.ndarray] | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return scores and columns of the best points of the shard.

        Args:
            asking: Query points.
            k: Number of neighbors.
            own: Column of each query itself, or a number that is not a column.
            codes: Codes of queries and of columns that must not find each other.
        """
        device = self.points.device
        barred = None if codes is None else Barred(*(_tensor(each).to(device) for each in codes))
        self_columns = None if own is None else _tensor(own).to(device)
        found = nearest(_tensor(asking).to(device), self.points, k, own=self_columns, barred=barred)
        values, columns = zip(*((value.cpu(), column.cpu()) for _, value, column in found), strict=True)
        return torch.cat(values).numpy(), torch.cat(columns).numpy()


def _tensor(array: np.ndarray) -> Tensor:
    """Return an array of Ray's object store as a tensor, without a copy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the memory is read-only, and nothing is written to it
        return torch.from_numpy(array)
