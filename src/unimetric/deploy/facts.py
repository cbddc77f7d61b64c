"""The files of an index folder, and the content of its `index.toml`."""

from __future__ import annotations

import json
import math
import secrets
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from unimetric.config import RunConfig, to_toml
from unimetric.deploy.placement import Placement
from unimetric.errors import DAMAGED_INDEX, UnimetricError
from unimetric.files import write_text
from unimetric.spec import create
from unimetric.stores._points import TYPES

FORMAT = 1
FACTS, MODEL, STORE, LEDGER = "index.toml", "model", "store", "files.db"
THRESHOLDS, UNREADABLE = "thresholds.json", "unreadable.txt"
RUNTIMES = ("torch", "onnx")


@dataclass(frozen=True)
class Facts:
    """Content of `index.toml`.

    Args:
        format: Version of the folder.
        unimetric, torch: Versions that have built the index.
        state: `building` until the first build is complete, then `ready`, and `updating` during an update.
        generation: Number of times that the index has changed.
        weights: Hash of the weights.
        backbone, head, transform: Spec strings of the model.
        dim: Dimension of the embeddings.
        store: Spec string of the store.
        source: Folder, csv file or dataset spec string of the last build.
        root: Absolute path of the folder that ids are relative to.
        labels: Whether the class of an image is the name of its folder.
        count: Number of images in the store.
        unreadable: Number of files that could not be read.
        columns: Type of each column.
        placement: Geometry of the vectors, with the center and scale of the first build.
        report: What the store has measured.
        runtime: Runtime of the model: `torch`, or `onnx` for an exported file.
        build: Random text of the first build. Empty in an index of an earlier version.
    """

    format: int
    unimetric: str
    torch: str
    state: str
    generation: int
    weights: str
    backbone: str
    head: str
    transform: str
    dim: int
    store: str
    source: str
    root: str
    labels: bool
    count: int
    unreadable: int
    columns: dict[str, str]
    placement: Placement
    report: dict[str, Any]
    runtime: str = "torch"
    build: str = ""

    @property
    def model(self) -> str:
        """Name of the folder or file of the model."""
        return MODEL if self.runtime == "torch" else f"{MODEL}.{self.runtime}"

    @property
    def version(self) -> str:
        """Text that changes when the index has changed, or another one has its path."""
        return "-".join(filter(None, (self.weights[:12], str(self.generation), self.build)))

    @property
    def network(self) -> tuple[str, ...]:
        """Texts that are the same in two indexes only if one model embeds for both."""
        return self.weights, self.backbone, self.head, self.transform, self.placement.geometry

    def write(self, folder: Path) -> None:
        """Write the file atomically."""
        values = asdict(self)
        tables = {key: values.pop(key) for key in ("columns", "placement", "report")}
        lines = [f"{key} = {to_toml(value)}" for key, value in values.items()]
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(f"{to_toml(key)} = {to_toml(value)}" for key, value in table.items() if value is not None)]
        write_text(folder / FACTS, "\n".join(lines) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Facts:
        """Read the file of an index folder."""
        file = folder / FACTS
        if not file.is_file():
            raise UnimetricError(f"{folder}: not an index (it has no {FACTS})", "build one: `unimetric index RUN images/ --out my.index`")
        try:
            found = tomllib.loads(file.read_text(encoding="utf-8", errors="surrogateescape"))
            if found["format"] > FORMAT:
                raise UnimetricError(f"{file}: was written by a newer Unimetric ({found['unimetric']})", "update Unimetric")
            placement = found["placement"]
            found["placement"] = Placement(**placement | {"center": tuple(map(float, placement["center"]))})
            facts = cls(**{each.name: found[each.name] for each in fields(cls) if each.name in found or each.default is MISSING})
            if not isinstance(facts.dim, int) or not all(kind in TYPES for kind in facts.columns.values()):
                raise ValueError("unknown type")
            if facts.runtime not in RUNTIMES:
                raise ValueError(f"unknown runtime `{facts.runtime}`")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnimetricError(f"{file}: cannot be read: {error}", DAMAGED_INDEX) from None
        return facts


def read_thresholds(folder: Path) -> dict[str, Any] | None:
    """Return the content of `thresholds.json`, or None if there is none."""
    file = folder / THRESHOLDS
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        limits = {key: float(found[key]) for key in ("threshold", "fpr")}
        if not all(map(math.isfinite, limits.values())):
            raise ValueError("`threshold` and `fpr` must be finite")
        return dict(found) | limits
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnimetricError(f"{file}: cannot be read: {error}", "remove it, or run `unimetric calibrate` again") from None


def write_unreadable(folder: Path, files: Iterable[tuple[str, str]]) -> None:
    """Write id and reason of files that could not be read, one per line.

    An id with a tab or a line break, or that starts with a quote, is written as JSON.
    """
    lines = []
    for name, reason in files:
        plain = [name] == name.splitlines() and "\t" not in name and not name.startswith('"')
        lines.append(f"{name if plain else json.dumps(name)}\t{' '.join(reason.split())}\n")
    write_text(folder / UNREADABLE, "".join(lines))


def read_unreadable(folder: Path) -> list[tuple[str, str]]:
    """Return what `write_unreadable` has written, or nothing if there is no file."""
    file = folder / UNREADABLE
    lines = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if file.is_file() else []
    found = []
    for name, _, reason in (line.partition("\t") for line in lines):
        with suppress(ValueError):  # earlier versions have written ids that start with a quote as they are
            name = json.loads(name) if name.startswith('"') else name
        found.append((name, reason))
    return found


def new_facts(config: RunConfig, *, dim: int, store: str, labels: bool, placement: Placement, runtime: str) -> Facts:
    """Return the facts of an index that is about to be built."""
    return Facts(
        format=FORMAT,
        unimetric=version("unimetric"),
        torch=str(torch.__version__),
        state="building",
        generation=0,
        weights="",  # computed while images are read
        backbone=config.backbone,
        head=config.head,
        transform=config.transform,
        dim=dim,
        store=store,
        source="",
        root="",
        labels=labels,
        count=0,
        unreadable=0,
        columns={},
        placement=placement,
        report={},
        runtime=runtime,
        build=secrets.token_hex(4),
    )


def check_same(facts: Facts, *, weights: str, transform: str | None, store: str | None, labels: bool | None, path: Path) -> Facts:
    """Raise an error if an index was built in another way.

    Returns its facts with the new options.

    Args:
        facts: Facts of the index.
        weights: Hash of the weights of the given model; empty for the index's own.
        transform: Transform spec string, or None for that of the index.
        store: Spec string of the store, or None for that of the index.
        labels: Whether folders are classes, or None for the choice of the index.
        path: Index folder, for errors.
    """
    if weights and weights != facts.weights:
        raise UnimetricError(
            f"{path}: was built by another model ({facts.backbone}, weights {facts.weights[:12]})",
            f"choose another --out, or use its own model: `{path / facts.model}`",
        )
    if transform is not None and create("transforms", transform) != create("transforms", facts.transform):
        raise UnimetricError(
            f"{path}: was built with `transform = {facts.transform!r}`, got {transform!r}", "choose another folder, or the same transform"
        )
    if store is not None and store != facts.store:
        raise UnimetricError(f'{path}: was built with `--store "{facts.store}"`', "choose another --out, or use the same store")
    return facts if labels is None else replace(facts, labels=labels)


def check_index(path: str | Path) -> bool:
    """Return whether a folder is an index."""
    return (Path(path) / FACTS).is_file()
