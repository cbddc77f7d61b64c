"""`data.json`: the images of a run, and checksums of its files. No torch.

Checksums are those of a finished run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from unimetric.errors import UnimetricError
from unimetric.files import write_text
from unimetric.images.pack import located, opened
from unimetric.images.packing import relative_names
from unimetric.images.regions import file_of
from unimetric.images.remote import find_statuses
from unimetric.images.table import Split, Table

RECORD = "data.json"
#: Length of `{"sha256":"...",`, the start of the file.
_START = len('{"sha256":"",') + 64

#: Small files that do not change after a run. Weights store their own checksum, because they are replaced during a run.
SEALED = ("done", "metrics.jsonl", "environment.json", "skipped.txt")


class Image(NamedTuple):
    """Identity of an image: relative path, bytes, modification time, and class.

    The time is in nanoseconds. It is 0 in a pack.
    """

    name: str
    size: int
    modified: int
    label: str

    @property
    def without_time(self) -> tuple[str, int, str]:
        """Path, bytes and class, which do not change if the image is copied."""
        return self.name, self.size, self.label


def describe_images(table: Table, parts: Mapping[str, np.ndarray]) -> dict[str, list[Image]]:
    """Describe the images of some parts of a table without reading them."""
    names, classes = relative_names(table.paths), table.class_names
    chosen = {row for rows in parts.values() for row in rows.tolist()}
    remote = find_statuses(file_of(table.paths[row]) for row in chosen if located(table.paths[row]) is None)

    def describe(row: int) -> Image:
        path = table.paths[row]
        found = remote.get(file_of(path), ()) or _size_and_time(path)
        return Image(names[row], *found, classes[table.labels[row]])

    return {part: [describe(row) for row in rows.tolist()] for part, rows in parts.items()}


def _size_and_time(path: str) -> tuple[int, int]:
    location = located(path)
    if location is not None:
        return int(opened(location[0]).lengths[location[1]]), 0
    try:
        state = os.stat(file_of(path))
    except OSError:  # reading it raises a better error
        return -1, 0
    return state.st_size, state.st_mtime_ns


def describe_packs(table: Table) -> list[list[str]]:
    """Return name and hash of each pack of a table.

    A pack stores the hash, so no image is read.
    """
    files = dict.fromkeys(location[0] for location in map(located, table.paths) if location)
    return [[os.path.basename(file), opened(file).fingerprint] for file in files]


def record_images(folder: Path, table: Table, split: Split, watched: Mapping[str, Table] = MappingProxyType({})) -> None:
    """Write `data.json`.

    Args:
        folder: Run folder.
        table: Table of the images.
        split: Rows of training, validation and test.
        watched: Tables of other datasets; only their hashes are stored.
    """
    parts = describe_images(table, split.parts)
    columns = {part: _columns(images) | {"roles": _hash_roles(table, split.parts[part])} for part, images in parts.items()}
    others = {"watched": {text: _hash_table(other) for text, other in watched.items()}} if watched else {}
    write_record(folder, {"packs": describe_packs(table), **columns, **others})


def check_watched(folder: Path, watched: Mapping[str, Table]) -> None:
    """Raise an error if the images of other datasets have changed since a run started."""
    before = (read_record(folder) or {}).get("watched", {})  # earlier versions have not stored it
    for text, table in watched.items():
        now = _hash_table(table)
        if before.get(text, now) != now:
            raise UnimetricError(
                f"{folder}: the images of `{text}` have changed since the run started",
                f"restore them, or start from scratch with another --out; if they were only copied, remove {folder / RECORD}",
            )


def _hash_table(table: Table) -> str:
    """Return the hash of all images of a table, their roles and groups."""
    rows = np.arange(len(table))
    return _hash(json.dumps([describe_packs(table), describe_images(table, {"": rows})[""], _hash_roles(table, rows)]).encode())


def _hash_roles(table: Table, rows: np.ndarray) -> str:
    """Return the hash of queries, gallery and groups of some rows."""
    groups = np.array([*table.group_names, ""])[table.group[rows]].tolist()  # -1, no group, is the last
    return _hash(json.dumps([table.query[rows].tolist(), table.gallery[rows].tolist(), groups]).encode())


def _columns(images: list[Image]) -> dict[str, list[Any]]:
    classes = sorted({image.label for image in images})
    number = {name: index for index, name in enumerate(classes)}
    return {
        "names": [image.name for image in images],
        "sizes": [image.size for image in images],
        "modified": [image.modified for image in images],
        "classes": classes,
        "labels": [number[image.label] for image in images],
    }


def _rows(columns: dict[str, list[Any]]) -> list[Image]:
    labels = [columns["classes"][label] for label in columns["labels"]]
    return [Image(*row) for row in zip(columns["names"], columns["sizes"], columns["modified"], labels, strict=True)]


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write `data.json`, which starts with the checksum of the rest and those of the files."""
    rest = json.dumps({"files": record.get("files", {}), **record}, separators=(",", ":"))[1:]
    write_text(folder / RECORD, f'{{"sha256":"{_hash(rest.encode())}",{rest}')


def read_record(folder: Path) -> dict[str, Any] | None:
    """Read `data.json`, or return None if an earlier version made the folder.

    A damaged file is an error.
    """
    path = folder / RECORD
    hint = "restore the file, or remove it to continue without comparing the images"
    try:
        text = path.read_text(encoding="utf-8")
        record = json.loads(text)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UnimetricError(f"{path}: unreadable: {error}", hint) from None
    checksum = record.pop("sha256", "") if isinstance(record, dict) else ""
    # Earlier versions have hashed the sorted content.
    if not checksum or not (_is_intact(text) or checksum == _hash(json.dumps(record, sort_keys=True).encode())):
        raise UnimetricError(f"{path}: was modified", hint)
    return record


def read_images(folder: Path) -> dict[str, list[Image]]:
    """Return the images of a run by part: `train`, `validation`, `test`.

    The result is empty if an earlier version made the folder.
    """
    record = read_record(folder) or {}
    return {part: _rows(record[part]) for part in ("train", "validation", "test") if part in record}


def _read_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums of the files of a run.

    They are at the start of `data.json`. Thousands of images follow, which are hashed and not parsed.
    """
    try:
        text = (folder / RECORD).read_text(encoding="utf-8")
    except (OSError, ValueError):
        text = ""  # `read_record` raises the error
    if text.startswith('"files":', _START) and _is_intact(text):
        return json.JSONDecoder().raw_decode(text, _START + len('"files":'))[0]
    return (read_record(folder) or {}).get("files", {})


def _is_intact(text: str) -> bool:
    """Return whether the text of `data.json` has the checksum at its start."""
    return text[:_START] == f'{{"sha256":"{_hash(text[_START:].encode())}",'


def count_images(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the numbers of images and classes of each part.

    They are unknown if an earlier version made the folder.
    """
    record = read_record(folder) or {}
    return {
        part: (len(record[part]["names"]), len(record[part]["classes"]))
        for part in ("train", "validation", "test")
        if record.get(part, {}).get("names")
    }


def check_images(folder: Path, table: Table, parts: Mapping[str, np.ndarray]) -> bool:
    """Raise an error if the images of a run have changed since it started.

    Args:
        folder: Run folder.
        table: Table of the images now.
        parts: Rows by part: `train`, `validation`, `test`.

    Returns:
        Whether the folder has a record to compare with.
    """
    record = read_record(folder)
    if record is None:
        return False
    packs = zip(describe_packs(table), record["packs"], strict=False)  # a missing pack shows in the images
    problem = [f"{name} has other content" for (name, now), (_, before) in packs if now != before]
    differ = False
    changes: dict[str, list[str]] = {"changed": [], "added": [], "removed": []}
    for part, images in describe_images(table, parts).items():
        before = _rows(record[part])
        differ |= before != images
        roles = _hash_roles(table, parts[part])
        if before == images and record[part].get("roles", roles) != roles:  # earlier versions have not stored them
            problem.append(f"{part} images have other roles (query, gallery) or groups")
        for kind, names in _differences(before, images).items():
            changes[kind] += names
    if not differ and not problem:
        return True
    names = [name for each in changes.values() for name in each]
    if names:
        counts = ", ".join(f"{len(each)} {kind}" for kind, each in changes.items())
        problem.append(f"{counts} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})")
    raise UnimetricError(
        f"{folder}: the images have changed since the run started: {'; '.join(problem) or 'they are in another order'}",
        f"restore them, or start from scratch with another --out; if they were only copied, remove {folder / RECORD}",
    )


def _differences(before: list[Image], now: list[Image]) -> dict[str, list[str]]:
    old, new = ({image.name: image for image in images} for images in (before, now))
    return {
        "changed": [name for name in old if name in new and old[name] != new[name]],
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
    }


def seal_files(folder: Path, *, finished: bool) -> None:
    """Add the checksums of the small files of a finished run to `data.json`.

    If the run is not finished, old checksums are removed.
    """
    record = read_record(folder)
    if record is None:
        return
    before = record.pop("files", {})
    if finished:
        record["files"] = {name: _hash((folder / name).read_bytes()) for name in SEALED if (folder / name).exists()}
    if record.get("files", {}) != before:
        write_record(folder, record)


def check_files(folder: Path, names: Collection[str] = SEALED) -> None:
    """Raise an error if a file of a finished run was modified."""
    for name, checksum in _read_checksums(folder).items():
        if name not in names:
            continue
        if not (folder / name).is_file() or _hash((folder / name).read_bytes()) != checksum:
            raise UnimetricError(
                f"{folder / name}: was modified after the run", f"restore the file, or remove {folder / RECORD} to accept it"
            )


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def finished_lines(folder: Path, upto: int) -> list[str]:
    """Return the complete lines of `metrics.jsonl` up to an epoch."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return [line for line in lines if _epoch(line) <= upto]


def _epoch(line: str) -> float:
    try:
        return float(json.loads(line)["epoch"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf


def hash_log(folder: Path, upto: int) -> str:
    """Return the hash of the lines of `metrics.jsonl` up to an epoch, for the checkpoint."""
    return _hash("\n".join(finished_lines(folder, upto)).encode())
