"""Embed the images of an index on a Ray cluster, in fixed shards.

A shard is a list of images, and one task of Ray. The task writes a file with the embeddings under a name that is the hash
of the list and of the model. If the file exists, the task need not run. The caller merges shards in order, and removes
the file of a shard that it has stored.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from unimetric.deploy.embedding import Embedder, Reading, open_embedder, open_own
from unimetric.deploy.facts import Facts
from unimetric.deploy.ledger import Work
from unimetric.errors import UnimetricError, first_line
from unimetric.images.pack import count_cores
from unimetric.images.remote import join_path
from unimetric.runs.cluster import connect, import_ray
from unimetric.runs.storage import absolute, list_files, read, remove, write
from unimetric.spec import trusted, trusting

#: Shards per worker that may be embedded but not merged, because an earlier one is not done.
_AHEAD = 4
#: Folder of the shard files in an index.
SHARDS = "shards"


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that embeds images.

    Args:
        address: Address of the cluster. `auto` finds the cluster of this machine, `local` starts one here.
        workers: Shards at once. Defaults to as many as the cluster has cores or GPUs for.
        gpus: GPUs per worker; with 0.5, two workers share one.
        cpus: Cores per worker. With two or more, as many processes read images for it.
        shards: Folder or fsspec URL of the shard files, which every machine must reach. Defaults to `shards/` in the index.
    """

    address: str
    workers: int | None = None
    gpus: float = 0.0
    cpus: float = 1.0
    shards: str = ""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise UnimetricError(f"`--workers` must be at least 1 with `--ray`, got {self.workers}", "use `--workers 2`, or remove it")

    def connect(self) -> tuple[Any, int]:
        """Return the module `ray`, connected, and the number of shards at once."""
        cores = None if self.workers is None else max(count_cores(), math.ceil(self.workers * self.cpus))
        ray = connect(self.address, cpus=cores)
        there = ray.cluster_resources()
        fits = [int(there.get(name, 0) / need) for name, need in (("GPU", self.gpus), ("CPU", self.cpus)) if need]
        if 0 in fits:
            need, held = f"{self.cpus:g} cores and {self.gpus:g} GPUs", f"{there.get('CPU', 0):g} and {there.get('GPU', 0):g}"
            hint = "use smaller --cpus and --gpus, or add a machine to the cluster"
            raise UnimetricError(f"a worker needs {need}, the cluster has {held}", hint)
        return ray, self.workers or min(fits, default=count_cores())

    def embed(
        self, path: Path, facts: Facts, settings: dict[str, Any], works: Iterable[Work], *, root: str, size: int
    ) -> Iterator[tuple[list[Work], list[Reading], Tensor]]:
        """Yield the images, readings and embeddings of each shard, in order.

        An image that cannot be read has a reading and no embedding.

        Args:
            path: Index folder.
            facts: Content of its `index.toml`.
            settings: Settings that replace those of the model. `evaluate_batch` must divide `size`, so that batches are the
                same as without a cluster.
            works: Images to embed.
            root: Folder that ids are relative to.
            size: Images per shard.
        """
        ray, workers = self.connect()
        place = absolute(self.shards or path / SHARDS)
        found = list_files(place)
        model = path / facts.model
        listed = [model] if model.is_file() else sorted(file for file in model.rglob("*") if file.is_file())
        files = {str(file.relative_to(path)): file.read_bytes() for file in listed}
        key = _hash([(name, hashlib.sha256(data).hexdigest()) for name, data in files.items()], sorted(settings.items()))
        # In a list, Ray passes a reference instead of the files, which a process reads once.
        shared = [ray.put((facts, files))]
        # A lost process is replaced three times per shard. Without `max_calls=0`, Ray ends a process with a GPU after each task.
        task = ray.remote(max_calls=0, num_gpus=self.gpus, num_cpus=self.cpus, max_retries=3)(embed_shard)
        readers = int(self.cpus) if self.cpus >= 2 else 0

        def submit(shard: list[Work]) -> tuple[list[Work], str, Any]:
            name = _hash(key, root, [(work.id, work.size, work.mtime, work.known) for work in shard])[:32] + ".safetensors"
            if name in found:
                return shard, name, None
            items = [(join_path(root, work.id), work.known) for work in shard]
            return shard, name, task.remote(shared, key, settings, items, place, name, readers=readers, trust=trusted())

        for shard, name in _in_order(ray, map(submit, split_works(works, size)), workers):
            yield shard, *_read_shard(place, name)
            remove(place, name)


def _hash(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode("utf-8", "surrogateescape")).hexdigest()


def _in_order(ray: Any, submitted: Iterator[tuple[list[Work], str, Any]], workers: int) -> Iterator[tuple[list[Work], str]]:
    """Yield shards in order when they are done, with at most `workers` of them running."""
    queue: deque[tuple[list[Work], str, Any]] = deque()
    running: list[Any] = []
    try:
        while True:
            while len(running) < workers and len(queue) < _AHEAD * workers:
                following = next(submitted, None)
                if following is None:
                    break
                queue.append(following)
                running += [each for each in following[2:] if each is not None]
            if not queue:
                return
            if queue[0][2] in running:
                running = ray.wait(running)[1]
                continue
            shard, name, reference = queue.popleft()
            _check(ray, reference, shard)
            yield shard, name
    finally:
        for reference in running:
            ray.cancel(reference)


def split_works(works: Iterable[Work], size: int) -> Iterator[list[Work]]:
    """Yield images in lists of some length. The last one may be shorter."""
    works = iter(works)
    while shard := list(itertools.islice(works, size)):
        yield shard


def _check(ray: Any, reference: Any, shard: Sequence[Work]) -> None:
    """Raise an error if the task of a shard has failed."""
    if reference is None:
        return
    where = f"the shard from `{shard[0].id}` to `{shard[-1].id}`"
    try:
        ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UnimetricError):
            raise error.cause from None
        raise UnimetricError(f"{where}: {error.cause!r}", "fix it, and run the same command to resume") from error
    except ray.exceptions.RayError as error:
        raise UnimetricError(f"{where}: its worker was lost four times: {first_line(error)}", "run the same command to resume") from None


def _read_shard(place: str, name: str) -> tuple[list[Reading], Tensor]:
    data = read(place, name)
    try:
        found = load(data or b"")
        listed = json.loads(found["readings"].numpy().tobytes())
        readings = [Reading(bytes.fromhex(digest) if digest else None, problem, embedded) for digest, problem, embedded in listed]
        return readings, found["embeddings"]
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        hint = "remove it, and run the same command to resume; every machine must reach the folder of the shards"
        raise UnimetricError(f"{place}/{name}: {'is missing' if data is None else f'cannot be read: {error}'}", hint) from None


# --- in a worker -------------------------------------------------------------------------------------------------------

#: The model of this process, by key, and its folder.
_OPEN: dict[str, tuple[Embedder, tempfile.TemporaryDirectory[str]]] = {}


def embed_shard(
    shared: list[Any],
    key: str,
    settings: dict[str, Any],
    items: list[tuple[str, bytes | None]],
    place: str,
    name: str,
    *,
    readers: int,
    trust: Sequence[str] = (),
) -> None:
    """Embed the images of a shard, and write its file.

    Args:
        shared: Reference to the content of `index.toml`, and to the files of the model.
        key: Hash of model and settings.
        settings: Settings that replace those of the model.
        items: Path of each image, and the digest of a content that need not be embedded again.
        place: Folder or fsspec URL of the shard files.
        name: Name of the file.
        readers: Number of processes that read images. 0 reads in this process.
        trust: Packages that the caller trusts; see `spec.trusting`.
    """
    with trusting(*trust):
        if key not in _OPEN:
            _OPEN.clear()
            _OPEN[key] = _open_model(shared[0], settings)
        embedder = _OPEN[key][0]
        readings: list[Reading] = []
        found = [torch.zeros(0, embedder.dim)]
        for some, embeddings in embedder.stream(items, workers=readers):
            readings += some
            found.append(embeddings.cpu())
    listed = [(each.digest.hex() if each.digest else None, each.problem, each.embedded) for each in readings]
    text = torch.frombuffer(bytearray(json.dumps(listed).encode()), dtype=torch.uint8)
    write(place, name, save({"embeddings": torch.cat(found), "readings": text}))


def _open_model(reference: Any, settings: dict[str, Any]) -> tuple[Embedder, tempfile.TemporaryDirectory[str]]:
    folder = tempfile.TemporaryDirectory()
    facts, files = import_ray().get(reference)
    for name, data in files.items():
        file = Path(folder.name, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return open_embedder(*open_own(Path(folder.name), facts, settings)), folder
