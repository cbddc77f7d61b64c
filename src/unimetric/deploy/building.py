"""Build and update an index: list a source, embed new images, and write them in shards."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from unimetric.analysis.calibrate import read_calibration
from unimetric.arguments import local_path
from unimetric.config import RunConfig, from_backbone, load
from unimetric.datasets.files import LABEL, ImageFile, column_types, describe_files, place_file, read_csv, walk
from unimetric.deploy.embedding import Embedder, Reading, open_embedder, open_own, weights_of
from unimetric.deploy.export import merge_adapter, without_weights, write_model
from unimetric.deploy.facts import (
    FACTS,
    LEDGER,
    MODEL,
    STORE,
    THRESHOLDS,
    UNREADABLE,
    Facts,
    check_index,
    check_same,
    new_facts,
    write_unreadable,
)
from unimetric.deploy.ledger import Ledger, Work
from unimetric.deploy.placement import Placement
from unimetric.deploy.sharding import SHARDS, Cluster, split_works
from unimetric.errors import UnimetricError, closest
from unimetric.files import is_temporary, make_folder, remove_stale, write_bytes, write_json
from unimetric.images.loading import Progress
from unimetric.images.pack import count_cores
from unimetric.images.remote import common_folder, is_remote, join_path, make_absolute
from unimetric.images.table import Table
from unimetric.kinds import Loss, Store
from unimetric.runs.exported import Exported, format_of, open_exported
from unimetric.runs.folder import lock_folder, open_run, overridden
from unimetric.runs.model import build_model, loss_with_geometry, place
from unimetric.runs.weights import hash_tensors
from unimetric.spec import bind_arguments, complete_arguments, create, names, parse, text_of
from unimetric.stores._points import check_name

#: Images and seconds after which a shard is written.
_SHARD, _SECONDS = 4096, 60.0
#: Images up to which this process reads alone, because starting others takes longer than they save.
_ALONE = 64
#: Settings that depend on the machine, not on the index.
_LOCAL = ("device", "precision", "evaluate_batch")
#: Nanoseconds in which a file may change twice without a new time.
_RACE = 2_000_000_000


# --- sources -----------------------------------------------------------------------------------------------------------


@dataclass
class Source:
    """Images to index.

    Args:
        text: Folder, csv file or dataset spec string, with an absolute path.
        root: Absolute path of the folder that ids are relative to.
        files: Function that lists the images.
        columns: Types of the columns, to which `files` casts.
        problems: Sentences about folders that could not be listed.
    """

    text: str
    root: str
    files: Callable[[], Iterable[ImageFile]]
    columns: dict[str, type] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def open_source(source: str | Path, *, labels: bool, skip: Path | None = None) -> Source:
    """Return the images of a folder, a csv or parquet file, tar files, a pack or a dataset.

    Args:
        source: Folder of images at any depth, csv or parquet file with a column `path`, tar files such as `data/{000..009}.tar`, pack,
            or dataset spec string. Files may have an address, such as `s3://bucket/{000..009}.tar`.
        labels: Whether the class of an image in a folder is the name of its folder.
        skip: Folder in the source whose images are skipped, such as the index, which stores uploaded images.
    """
    text = local_path(str(source))
    path = Path(text).expanduser()
    if path.is_dir():
        root = os.path.abspath(path)
        columns: dict[str, type] = {LABEL: str} if labels else {}
        found = Source(root, root, lambda: walk(Path(root), labels=labels, problems=found.problems, skip=skip), columns)
        return found
    suffix, whole = path.suffix.lower(), make_absolute(text if is_remote(text) else str(path))
    if suffix in (".csv", ".parquet"):
        types = column_types(whole)
        return Source(whole, os.path.dirname(whole), lambda: read_csv(whole, types), types)
    if suffix in (".tar", ".pack"):
        text = f"tar(shards={whole!r})" if suffix == ".tar" else f"pack(path={whole!r})"
    name = text.partition("(")[0]
    if not name.isidentifier() or name not in names("datasets"):
        hint = "name a folder of images, a csv or parquet file with a column `path`, tar files or a pack"
        raise UnimetricError(f"{text}: no such folder, csv file or dataset", hint if os.sep in text else closest(name, names("datasets")))
    table: Table = create("datasets", text)
    paths = [make_absolute(each) for each in table.paths]
    root = common_folder(paths)

    def rows() -> Iterator[tuple[str, str, dict[str, Any]]]:
        for row, each in enumerate(paths):
            label = table.class_names[table.labels[row]]
            yield each[len(root) :].lstrip(os.sep if root else "").replace(os.sep, "/"), each, {LABEL: label} if label else {}

    return Source(_spec_with_absolute_paths(text), root, lambda: describe_files(rows()), {LABEL: str})


def _spec_with_absolute_paths(text: str) -> str:
    """Return the spec string of a dataset as it is read from any working directory."""
    name, written = parse(text).name, bind_arguments("datasets", text)
    if "parts" in written:
        written["parts"] = [_spec_with_absolute_paths(part) for part in written["parts"]]
    for key, value in complete_arguments("datasets", text).items():
        located = key in ("root", "path", "shards") or (key == "file" and name == "csv")  # others are relative to these
        if located and isinstance(value, str):  # a dataset of another package may default to None
            written[key] = make_absolute(value if key == "path" else place_file(value))
    return text_of(name, written)


# --- models ------------------------------------------------------------------------------------------------------------


def open_model(model: str | Path, settings: dict[str, Any]) -> tuple[RunConfig, Any]:
    """Return settings and model of a run, an exported folder or file, or a backbone.

    Args:
        model: Folder, ONNX file, or backbone spec string.
        settings: Settings that replace those of the model, such as `device` or `transform`.
    """
    text = str(model)
    if Path(text).is_dir():
        return open_run(text, settings)
    if format_of(text):
        config, exported = open_exported(text, settings)
        open_embedder(config, exported)  # a file that cannot be run is reported before anything is written
        return config, exported
    config = from_backbone(text, settings, "index", "run folder")
    chosen = complete_arguments("backbones", text, seed=0)
    options = {"pretrained", "weights"} & chosen.keys()
    own = "." in parse(text).name and not options  # the weights of a third-party backbone
    if not own and not any(chosen[key] for key in options):
        hint = "add `pretrained=True` or `weights='...'`" if options else "train it with `unimetric train`, and name the run folder"
        raise UnimetricError(f"`{text}`: its weights are random, so it finds nothing", hint)
    return config, build_model(config)


def _prepare(
    model: str | Path | None, path: Path, *, store: str | None, labels: bool | None, settings: dict[str, Any]
) -> tuple[Facts, Callable[[], tuple[RunConfig, Any]]]:
    """Open the model of a new index, or compare it with that of an existing index.

    Returns:
        The facts of the index, and a function that returns settings and model. An update without new images does not call it.
    """
    if check_index(path):
        facts = Facts.read(path)
        weights = ""
        if model is not None and os.path.abspath(model) != os.path.abspath(path / facts.model):
            weights = _find_weights(model, facts.weights, settings)
        facts = check_same(facts, weights=weights, transform=settings.get("transform"), store=store, labels=labels, path=path)
        return facts, lambda: open_own(path, facts, {key: value for key, value in settings.items() if key in _LOCAL})
    if model is None:
        Facts.read(path)  # raises an error
    assert model is not None
    bind_arguments("stores", store or "flat", path="", dim=1)
    config, network = _open_merged(model, settings)
    loss = loss_with_geometry(config, network.dim)
    options = place(torch.zeros(1, network.dim), loss, config.geometry)[1]
    placement = Placement(options["geometry"], float(options.get("curvature", 0.1)))
    facts = new_facts(
        config,
        dim=int(network.dim),
        store=store or "flat",
        labels=bool(labels),
        placement=placement,
        runtime=format_of(network.path) if isinstance(network, Exported) else "torch",
    )
    return facts, lambda: (config, network)


def _find_weights(model: str | Path, expected: str, settings: dict[str, Any]) -> str:
    """Return the hash of the weights of a model.

    A model whose file contains the expected weights is not built, which takes as long as embedding several images.
    """
    folder = Path(model)
    with contextlib.suppress(OSError, SafetensorError):  # `open_model` raises the error
        if hash_tensors(load_file(folder / "model.safetensors")).hex() == expected:
            overridden(load(folder / "config.toml"), settings, folder)  # checks the settings
            return expected
    return weights_of(_open_merged(model, settings)[1])


def _open_merged(model: str | Path, settings: dict[str, Any]) -> tuple[RunConfig, Any]:
    """Open a model as `open_model` does, with its adapter merged as an export does."""
    config, network = open_model(model, settings)
    return (config if isinstance(network, Exported) else merge_adapter(config, network)), network


# --- building ----------------------------------------------------------------------------------------------------------


def build(
    model: str | Path | None,
    source: str | Path,
    path: Path,
    *,
    store: str | None = None,
    labels: bool | None = None,
    workers: int | None = None,
    cluster: Cluster | None = None,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
    **settings: Any,
) -> dict[str, int]:
    """Build an index, resume its build, or update it.

    Args:
        model: Run folder, exported folder, ONNX file, or backbone spec string with pretrained weights. None for the model of the index.
        source: Folder of images at any depth, csv file with a column `path`, or dataset spec string.
        path: Index folder.
        store: Store spec string. Defaults to that of the index, or `flat`.
        labels: Whether the class of an image is the name of its folder. Defaults to the choice of the index, or no.
        workers: Number of processes that read images. Defaults to the number of cores, at most 16.
        cluster: Ray cluster that embeds the images, in place of this process and its `workers`.
        progress: Callback with (finished images, all images to read).
        note: Callback with sentences about skipped folders.
        settings: Settings of the run, such as `device`, `precision` or `transform`.

    Returns:
        Numbers of images: `added`, `changed`, `deleted`, `unreadable` (of all).
    """
    _check_folder(path)
    make_folder(path)
    with lock_folder(path, "writing to"), _discard_empty(path) as counts, contextlib.ExitStack() as stack:
        facts, opened = _prepare(model, path, store=store, labels=labels, settings=settings)
        images = open_source(source, labels=facts.labels, skip=path)
        for name in images.columns:
            check_name(name)  # `index.toml` has them from the start
        if cluster is not None:
            cluster.connect()  # before anything is written
        remove_stale(path)
        held: Store = create("stores", facts.store, path=str(path / STORE), dim=facts.placement.extended(facts.dim))
        stack.callback(held.close)
        if not check_index(path) and len(held):
            raise UnimetricError(
                f"`{facts.store}`: already holds {len(held):,} points, of another index",
                "use another table or --out, or remove these points first",
            )
        # `files` casts to these types. Columns of the store keep theirs, whatever a new list contains; one without values has none yet.
        images.columns.update({name: kind for name, kind in held.columns.items() if name in images.columns})
        ledger = Ledger(path / LEDGER)
        stack.callback(ledger.close)
        count = min(16, count_cores()) if workers is None else workers
        given = None if check_index(path) else model
        run = _Build(path, facts, opened, held, ledger, images, count, cluster, progress, note or (lambda text: None), given, counts)
        with ledger.explained():
            return run.run()


@contextlib.contextmanager
def _discard_empty(path: Path) -> Iterator[dict[str, int]]:
    """Yield the counts of a build, and remove a new index that fails before its first image.

    If it is interrupted, it is only removed before its model is written.
    """
    new = all(each.name == ".lock" for each in path.iterdir())
    counts = {"added": 0, "changed": 0, "deleted": 0}
    try:
        yield counts
    except BaseException as error:
        begun = counts["added"] or (path / SHARDS).exists()  # the next call reads the shards
        if new and not begun and (isinstance(error, UnimetricError) or not check_index(path)):
            shutil.rmtree(path, ignore_errors=True)
        raise


def _check_folder(path: Path) -> None:
    """Raise an error if a folder exists and is neither an index nor the start of one."""
    try:
        names_ = [each.name for each in path.iterdir()] if path.is_dir() else []
        exists = path.exists()
    except OSError as error:
        raise UnimetricError(f"{path}: cannot be read: {error.strerror}", "choose another --out") from None
    begun = {MODEL, f"{MODEL}.onnx", STORE, LEDGER, THRESHOLDS, ".lock", FACTS}
    if (exists and not path.is_dir()) or (FACTS not in names_ and any(name not in begun and not is_temporary(name) for name in names_)):
        raise UnimetricError(f"{path}: exists and is not an index", "choose another --out")


def _copy_threshold(model: str | Path | None, network: Any, path: Path) -> None:
    """Copy the calibrated threshold of a run or an exported file."""
    found = read_calibration(str(model)) if model is not None and Path(model).is_dir() else None
    if isinstance(network, Exported):
        found = network.notes.get("threshold")
    if found:
        write_json(path / THRESHOLDS, found)


@dataclass
class _Build:
    """One pass over a source. See `build`."""

    path: Path
    facts: Facts
    opened: Callable[[], tuple[RunConfig, Any]]
    store: Store
    ledger: Ledger
    source: Source
    workers: int
    cluster: Cluster | None
    progress: Progress | None
    note: Callable[[str], None]
    given: str | Path | None  # model of a new index, until it is written
    counts: dict[str, int]
    begun: int = 0  # time in nanoseconds at which listing began
    # These are set when there are images to embed, and before anything is written.
    config: RunConfig = field(init=False)
    model: Any = field(init=False)
    loss: Loss | None = field(init=False)

    def run(self) -> dict[str, int]:
        before = self.facts
        self.begun = time.time_ns()
        work, gone, unnamed = self.ledger.compare(self.source.files())
        for problem in self.source.problems:
            self.note(f"{problem}; images in it are neither added nor deleted")
        gone = 0 if self.source.problems else gone
        self._check_listing(work + len(unnamed), gone)
        if work or self.given is not None:
            self.config, self.model = self.opened()
            self.loss = loss_with_geometry(self.config, self.model.dim)
        self.facts = replace(self.facts, source=self.source.text, root=self.source.root)
        self.facts = replace(self.facts, columns=self.facts.columns | {key: kind.__name__ for key, kind in self.source.columns.items()})
        if work or gone or self.facts.state != "ready" or self.facts != before:
            self.facts = replace(self.facts, state="building" if before.state == "building" else "updating")
            if self.given is None or self.cluster is not None or not work:
                self._write_model()
            work -= self._rewrite_columns()
            if work and self.cluster is not None:
                self._embed_on(self.cluster, work)
            elif work or self.given is not None:
                self._embed(work)
            for ids in self.ledger.gone() if gone else ():
                self.ledger.mark(ids)
                self.store.delete(ids)
                self.ledger.forget(ids)
                self.counts["deleted"] += len(ids)
            self._finish(before, unnamed)
        return self.counts | {"unreadable": self.facts.unreadable}

    def _write_model(self) -> None:
        """Write the model of a new index, and the facts, which make the folder an index."""
        if self.given is not None:
            config, own = self.config, self.path / self.facts.model
            self.facts = replace(self.facts, weights=weights_of(self.model))
            if isinstance(self.model, Exported):
                write_bytes(own, self.model.path.read_bytes())
            else:
                write_model(config, self.model, own, Path(self.given).name)
            _copy_threshold(self.given, self.model, self.path)
            # An export of an adapter, or of weights in another layout, may be another network. Later updates use that one.
            if isinstance(self.model, Exported) or config.adapter or without_weights(config.backbone) != config.backbone:
                local = {key: getattr(config, key) for key in _LOCAL}
                self.config, self.model = open_own(self.path, self.facts, local)
            self.given = None
        self.facts.write(self.path)

    def _check_listing(self, new: int, gone: int) -> None:
        """Raise an error if a source is empty, or is not that of the index."""
        count = self.facts.count
        if not new and not count and not self.ledger.size():
            raise UnimetricError(f"{self.source.text}: has no images", "name a folder of images, or a csv file with a column `path`")
        if gone and 2 * gone > self.ledger.size() and (self.source.root != self.facts.root or gone == self.ledger.size()):
            raise UnimetricError(
                f"{self.source.text}: {gone:,} of the {self.ledger.size():,} images of the index are not there; nothing was deleted",
                f"name the source of the index, {self.facts.source}, or choose another --out",
            )

    def _rewrite_columns(self) -> int:
        """Write new columns of images that have not changed, and return their number."""
        before = self.counts["changed"]
        for works in split_works((work for work in self.ledger.work() if work.same), _SHARD):
            ids = [work.id for work in works]
            self.ledger.mark_columns(works)
            self.store.write(ids, self.store.vectors(ids), self._columns(works))
            self.ledger.record_columns(works)
            self.counts["changed"] += len(works)
        return self.counts["changed"] - before

    def _columns(self, works: list[Work]) -> dict[str, list[Any]]:
        return {name: [work.columns.get(name) for work in works] for name in self.facts.columns}

    # --- embedding -----------------------------------------------------------------------------------------------

    def _embed(self, total: int) -> None:
        embedder: Embedder = open_embedder(self.config, self.model)
        waiting: deque[Work] = deque()
        done = 0

        def items() -> Iterator[tuple[str, bytes | None]]:
            for work in self.ledger.work():
                if not work.same:
                    waiting.append(work)
                    yield join_path(self.source.root, work.id), work.known

        shard: list[tuple[Work, Reading]] = []
        found: list[Tensor] = []
        chunks = embedder.read(items(), workers=self.workers if total > _ALONE else 0)
        if self.given is not None:  # a new model is written while processes read the first images
            self._write_model()
            embedder = open_embedder(self.config, self.model)
        begun = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            writer = _Writer(self, pool)
            for readings, embeddings in embedder.embed_chunks(chunks):
                shard += [(waiting.popleft(), reading) for reading in readings]
                found.append(embeddings)
                done += len(readings)
                if len(shard) >= _SHARD or time.monotonic() - begun > _SECONDS:
                    writer.submit(shard, torch.cat(found))
                    shard, found, begun = [], [], time.monotonic()
                if self.progress is not None:
                    self.progress(done, total)
            if shard:
                writer.submit(shard, torch.cat(found))
            writer.wait()

    def _embed_on(self, cluster: Cluster, total: int) -> None:
        """Embed on a cluster in the shards and batches of `_embed`, and write them in order."""
        batch = self.config.evaluate_batch or (256 if cluster.gpus else 32)
        settings = {"device": self.config.device, "precision": self.config.precision, "evaluate_batch": batch}
        works = (work for work in self.ledger.work() if not work.same)
        done = 0
        size = -(-_SHARD // batch) * batch
        for some, readings, embeddings in cluster.embed(self.path, self.facts, settings, works, root=self.source.root, size=size):
            self.ledger.mark([work.id for work in some])
            self.ledger.record(self.write(list(zip(some, readings, strict=True)), embeddings))
            done += len(some)
            if self.progress is not None:
                self.progress(done, total)

    def place(self, embeddings: Tensor) -> tuple[Any, Any]:
        """Return the vectors to store, and which embeddings have one.

        The first embeddings set center and scale.
        """
        points = place(embeddings, self.loss, self.config.geometry)[0]
        if len(points) and not self.facts.placement.frozen:
            self.facts = replace(self.facts, placement=self.facts.placement.fitted(points))
            self.facts.write(self.path)
        return self.facts.placement.vectors(points)

    def write(self, shard: list[tuple[Work, Reading]], embeddings: Tensor) -> list[tuple[Work, bytes | None, str | None, int]]:
        """Write a shard to the store, and return what the ledger must know of it."""
        vectors, valid = self.place(embeddings)
        works, rows, failed, altered, record = [], [], [], [], []
        row, lost = -1, 0
        for work, reading in shard:
            problem = reading.problem
            row += reading.embedded
            if reading.embedded and not valid[row]:
                problem = "its embedding is zero, infinite, or far from all others"
            if problem:
                failed.append(work.id)  # also if it is new, because a killed call may have stored it
                lost += not (work.fresh or work.failed)
            elif reading.embedded:
                works.append(work)
                rows.append(row)
            elif work.altered:
                altered.append(work)
            # A file that was written just before it was listed may be written again without a new time, so its time is not trusted.
            mtime = -1 if self.begun - work.mtime < _RACE else work.mtime
            record.append((work, reading.digest, problem or None, mtime))
        if works:
            some = vectors if len(rows) == len(vectors) else vectors[rows]
            self.store.write([work.id for work in works], some, self._columns(works))
        if altered:
            ids = [work.id for work in altered]
            self.store.write(ids, self.store.vectors(ids), self._columns(altered))
        if failed:
            self.store.delete(failed)
        self.counts["added"] += sum(work.fresh or work.failed for work in works)
        self.counts["changed"] += sum(not (work.fresh or work.failed) for work in works) + len(altered)
        self.counts["deleted"] += lost
        return record

    def _finish(self, before: Facts, unnamed: list[tuple[str, str]]) -> None:
        """Compact the store and the ledger, and write the new facts."""
        changed = any(self.counts.values()) or before.state != "ready"
        shutil.rmtree(self.path / SHARDS, ignore_errors=True)
        bad = [*self.ledger.unreadable(), *unnamed]
        if before.state == "building" and bad and not len(self.store):
            name, reason = bad[0]
            problem = f"{self.source.text}: needs at least 1 readable image, got 0 of {len(bad):,}; `{name}`: {reason}"
            raise UnimetricError(problem, "correct the paths, or name another source")
        if changed:
            self.store.finish()
            self.ledger.compact()
        if bad or (self.path / UNREADABLE).exists():
            write_unreadable(self.path, bad)
        self.facts = replace(
            self.facts,
            state="ready",
            count=len(self.store),
            unreadable=len(bad),
            generation=self.facts.generation + (changed or self.facts.root != before.root),  # images have other paths
            report=dict(self.store.report) if changed else self.facts.report,
        )
        self.facts.write(self.path)


class _Writer:
    """Thread that writes one shard while the next is embedded.

    The ledger has marks of its images before, and is written when the store has returned.
    """

    def __init__(self, build_: _Build, pool: ThreadPoolExecutor) -> None:
        self.build, self.pool = build_, pool
        self.pending: Future[list[tuple[Work, bytes | None, str | None, int]]] | None = None

    def submit(self, shard: list[tuple[Work, Reading]], embeddings: Tensor) -> None:
        """Wait for the last shard, then write this one."""
        self.wait()
        self.build.ledger.mark([work.id for work, _ in shard])
        self.pending = self.pool.submit(self.build.write, shard, embeddings)

    def wait(self) -> None:
        """Wait for the last shard, and record it."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self.build.ledger.record(pending.result())
