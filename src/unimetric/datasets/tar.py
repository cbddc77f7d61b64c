"""Tar files in the layout of WebDataset, read at any position."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from unimetric.arguments import Fraction
from unimetric.datasets._reading import SUFFIXES, place_file
from unimetric.datasets._tabulate import divide, sort_labels, tabulate, without_singles
from unimetric.errors import UnimetricError
from unimetric.files import cache_folder, write_text
from unimetric.images.members import join_member
from unimetric.images.remote import file_status, find_files, is_remote, make_absolute, open_file
from unimetric.images.table import Table

#: Position, number of bytes, name and label of each image.
Images = list[tuple[int, int, str, str | None]]

_VERSION = 4
_HINT = "images and labels are files such as 000017.jpg with 000017.cls or 000017.json"


def tar(
    *,
    shards: str,
    label: str = "label",
    train: Fraction | str = 0.5,
    on_single: Literal["error", "skip"] = "error",
    name: str | None = None,
) -> Table:
    """Tar files in the layout of WebDataset, with classes in files of the same key.

        000017.jpg        image; the key ends at the first dot
        000017.cls        its class as text, or
        000017.json       its class in the field `label`

    Files are not unpacked. The first use scans them once and stores the positions of all images in
    `UNIMETRIC_CACHE` (default: the cache folder of the user). At an address such as
    `s3://bucket/shoes.tar`, this downloads them; images are then read by byte ranges. Every image is then read at its
    position, so samplers, resuming and evaluation work as with single files, without a shuffle
    buffer. If no image has a class, all are of one class without a name, which can be embedded but
    not trained on. Compressed tar files cannot be read at a position and are an error.

    Reference:
        High performance I/O for large scale deep learning (Aizman et al., IEEE Big Data 2019), the
        layout; halves as in Oh Song et al. (CVPR 2016).

    Args:
        shards: Files with ranges `{000..009}`, alternatives `{a,b}` or wildcards, such as
            `data/shoes-{000..009}.tar` or `https://host/shoes-{000..009}.tar`.
        label: Field of a JSON file that holds the class.
        train: Training classes: a fraction of the sorted classes with several images (0.5 is the first half,
            rounded up), or a text file next to the shards with one class per line.
        on_single: What to do if a class has only one image: `error`, or `skip` the class.
        name: Name of the dataset. Defaults to the name of the folder of the shards.
    """
    files = find_shards(shards)
    paths: list[str] = []
    labels: list[str | None] = []
    for file in files:
        for position, length, member, found in _list_images(file, label):
            paths.append(join_member(file, position, length, member))
            labels.append(found)
    base = os.path.dirname(make_absolute(files[0]))
    name = name or os.path.basename(base)
    if not paths:
        raise UnimetricError(f"`{shards}` has no images", _HINT)
    if not any(each is not None for each in labels):
        return Table(
            paths=tuple(paths),
            labels=np.zeros(len(paths), np.int64),
            class_names=("",),
            train=np.zeros(len(paths), bool),
            source_names=(name,),
        )
    classes = [each for each in labels if each is not None]
    if len(classes) < len(labels):
        raise UnimetricError(f"`{paths[labels.index(None)]}` has no class, but other images have one", _HINT)
    class_names = sort_labels(classes)
    table = tabulate(name, paths, classes, {key: key for key in class_names}, divide(name, class_names, classes, train, base))
    return without_singles(table, on_single)


def find_shards(text: str) -> list[str]:
    """Return the files of a pattern, in the order of its ranges and alternatives.

    Args:
        text: Path or address with `{000..009}`, `{a,b}` or wildcards; see `place` for a leading `data`.
    """
    files: list[str] = []
    for each in expand_braces(text):
        path = place_file(each)
        found = [path]
        if glob.has_magic(each) and not os.path.exists(path):
            found = find_files(path) if is_remote(path) else sorted(glob.glob(path))
        missing = [one for one in found if not is_remote(one) and not os.path.isfile(one)] or ([] if found else [path])
        if missing:
            raise UnimetricError(f"tar: the file `{missing[0]}` does not exist", "name tar files, such as `shards='data/{000..009}.tar'`")
        files += found
    files = list(dict.fromkeys(files))  # a wildcard may match a file that is named as well
    if not files:
        raise UnimetricError(f"tar: a range must be from the lower to the higher number, got `{text}`", "write it as `{000..009}`")
    for file in files:
        if not file.lower().endswith(".tar"):
            raise UnimetricError(
                f"`{file}`: the name of a shard must end in .tar", "decompress it, because images are read at their positions"
            )
    return files


def expand_braces(text: str) -> list[str]:
    """Return the texts of a pattern with ranges and alternatives.

    >>> expand_braces("{a,b}-{08..10}.tar")
    ['a-08.tar', 'a-09.tar', 'a-10.tar', 'b-08.tar', 'b-09.tar', 'b-10.tar']
    """
    found = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{},]*(?:,[^{},]*)+))\}", text)
    if found is None:
        return [text]
    if found[3] is not None:
        words = found[3].split(",")
    else:
        words = [str(number).zfill(len(found[1])) for number in range(int(found[1]), int(found[2]) + 1)]
    return [text[: found.start()] + word + rest for word in words for rest in expand_braces(text[found.end() :])]


def _list_images(file: str, field: str) -> Images:
    """Return the images of a file, from the cache if the file has not changed since."""
    size, time = file_status(file)
    known = {"version": _VERSION, "file": make_absolute(file), "field": field, "size": size, "time": time}
    name = hashlib.sha256(repr((known["file"], field)).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    cached = cache_folder() / "tar" / f"{name}.json"
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        content = json.loads(cached.read_text(encoding="utf-8", errors="surrogateescape"))
        if content["known"] == known:
            return [(int(at), int(length), str(member), label) for at, length, member, label in content["images"]]
    images = _scan(file, field)
    with suppress(UnimetricError):  # without a cache, the file is scanned each time
        write_text(cached, json.dumps({"known": known, "images": images}, ensure_ascii=False))
    return images


def _scan(file: str, field: str) -> Images:
    """Read a tar file once, and return its images in their order."""
    images: dict[str, tuple[int, int, str, str]] = {}
    labels: dict[str, str] = {}
    try:
        for archive, member in _read_members(file):
            folder, _, base = member.name.rpartition("/")
            key, _, ending = base.partition(".")
            key, ending = f"{folder}/{key}", f".{ending.lower()}"
            is_image = ending.endswith(SUFFIXES)
            if member.isdir() or base.startswith(".") or not (is_image or ending in (".cls", ".json")):
                continue
            if not member.isreg() or member.issparse():
                raise UnimetricError(
                    f"`{file}: {member.name}`: must be a regular file, not a link or a sparse file",
                    "create the file with `tar --dereference --hard-dereference`, without `--sparse`",
                )
            if is_image:
                images.pop(member.name, None)  # a later file of the same name replaces it, as when it is unpacked
                images[member.name] = (member.offset_data, member.size, base, key)
            else:
                content = archive.extractfile(member)
                found = _read_label(content.read() if content else b"", ending, field, f"{file}: {member.name}")
                labels |= {} if found is None else {key: found}
    except tarfile.TarError as error:
        hint = "copy it again; if it is compressed, decompress it, because images are read at their positions"
        raise UnimetricError(f"`{file}`: is not a complete tar file ({error})", hint) from None
    except OSError as error:
        raise UnimetricError(f"`{file}`: cannot be read: {error.strerror}", "copy it again") from None
    samples = len({key for *_, key in images.values()})
    if samples < len(images):
        message = "`%s`: has %s images of %s keys; all are used, also masks such as 000017.mask.png"
        logging.getLogger("unimetric").warning(message, file, f"{len(images):,}", f"{samples:,}")
    return [(position, length, base, labels.get(key)) for position, length, base, key in images.values()]


def _read_members(file: str) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the members of a tar file, and of others that `cat` has appended to it."""
    with open_file(file) as stream:
        more = True
        while more:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                while (member := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined]  # a list of all members would take gigabytes
                    yield archive, member
            stream.seek(archive.offset)
            block = end = stream.read(512)
            if end not in (b"", bytes(512)):  # tarfile takes a partial header for the end
                raise tarfile.ReadError("unexpected end of data")
            while block and not any(block):
                block = stream.read(512)
            stream.seek(-len(block), os.SEEK_CUR)
            more = block[257:262] == b"ustar"  # anything else after an end mark is ignored, as by tar
    if not end:
        logging.getLogger("unimetric").warning("`%s`: has no end mark, so files may be missing at its end", file)


def _read_label(data: bytes, ending: str, field: str, where: str) -> str | None:
    """Return the class in a file next to an image, or None if it has none."""
    try:
        content: Any = data.decode()
        if ending == ".json":
            content = json.loads(content)
            content = content.get(field) if isinstance(content, dict) else None
    except ValueError as error:
        raise UnimetricError(f"`{where}`: cannot be read: {error}", _HINT) from None
    if isinstance(content, bool) or not isinstance(content, str | int):
        return None
    return str(content).strip() or None
