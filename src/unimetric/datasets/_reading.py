"""Find the files of a dataset, and read lists and annotations."""

from __future__ import annotations

import errno
import io
import logging
import os
import shlex
from collections.abc import Callable, Iterator
from csv import DictReader, Error
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from unimetric.errors import UnimetricError
from unimetric.images.remote import is_remote, open_file

#: Endings of image names, compared without case. The first frame of an animated image is read.
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".jp2", ".ppm")
#: Endings of images that are skipped with a warning. Reading them would change the classes and images of existing runs.
UNREAD = (".avif", ".heic", ".heif", ".jfif", ".jpe", ".pgm", ".pnm", ".tga")


def place(root: str) -> Path:
    """Resolve a root: `UNIMETRIC_DATA` replaces a leading `data`, and `~` is the home folder.

    >>> place("photos/shoes").as_posix()
    'photos/shoes'
    """
    path = Path(root).expanduser()
    elsewhere = os.environ.get("UNIMETRIC_DATA")
    if elsewhere and path.parts[:1] == ("data",):
        return Path(elsewhere).expanduser().joinpath(*path.parts[1:])
    return path


def place_file(file: str | Path) -> str:
    """Resolve the path of a file as `place` does.

    An address such as `s3://bucket/a.csv` remains.
    """
    return str(file) if is_remote(str(file)) else str(place(str(file)))


def locate(root: str, name: str, layout: str = "") -> Path:
    """Return the folder of a dataset, or raise an error that describes its expected content.

    Args:
        root: Folder as written in the configuration; see `place`.
        name: Name of the dataset, for the error.
        layout: Expected content of the folder, for the error.
    """
    if is_remote(root):
        raise UnimetricError(
            f"{name}: the root must be a local folder, got the address `{root}`", "list the images in a file, and use `csv(file='...')`"
        )
    folder = place(root)
    if folder.is_dir():
        return folder
    state = "is not a folder" if folder.exists() else "does not exist"
    holds = f" (it holds {layout})" if layout else ""
    move = ", or set UNIMETRIC_DATA to the folder that holds it" if Path(root).parts[:1] == ("data",) else ""
    raise UnimetricError(f"{name}: the folder `{folder}` {state}", f"put the dataset there{holds} or use `{name}(root='...')`{move}")


def need(folder: Path, *places: str, layout: str) -> Path:
    """Return the first of several paths that exists in a folder.

    If none exists, the error names the first one.
    """
    for here in places:
        if (folder / here).exists():
            return folder / here
    raise UnimetricError(f"`{folder / places[0]}` does not exist", f"the folder `{folder}` should hold {layout}")


def read_lines(source: str, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str | None]]]:
    """Yield the lines of a csv or parquet file as dictionaries of text, with their numbers.

    Memory is bounded.

    Args:
        source: Path or address of a csv file in UTF-8 whose first line names the columns, or of a parquet file.
        needed: Columns that it must have.
    """
    kind = "parquet" if is_parquet(source) else "csv"
    try:
        with open_file(source) as stream:
            yield from (_parquet_lines if kind == "parquet" else _csv_lines)(stream, source, needed)
    except FileNotFoundError:
        hint = f"name a {kind} file that has the columns {','.join(needed)}"
        raise UnimetricError(f"{kind}: the file `{source}` does not exist", hint) from None
    except (OSError, ValueError, Error) as error:
        hint = "write it again" if kind == "parquet" else "save it as a csv file in UTF-8"
        raise UnimetricError(f"cannot read `{source}`: {error}", hint) from None


def _csv_lines(stream: IO[bytes], source: str, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str | None]]]:
    reader = DictReader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), strict=True)
    _check_names(source, list(reader.fieldnames or ()), needed, f"its first line should be `{','.join(needed)}`, with commas")
    line = reader.line_num
    try:
        for row in reader:
            line = reader.line_num
            if None in row:
                hint = "put a value that holds a comma in double quotes"
                raise UnimetricError(f"`{source}`, line {line}: more values than columns", hint)
            yield line, row
    except Error as error:  # a quote that is never closed would hide all lines after it
        hint = 'close the quote, and write a quote inside of a value as `""`'
        raise UnimetricError(f"`{source}`, line {line + 1}: {error}", hint) from None


def _parquet_lines(stream: IO[bytes], source: str, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str | None]]]:
    file = open_parquet(stream, source)
    _check_names(source, file.schema_arrow.names, needed, f"it needs the columns {','.join(needed)}")
    number = 0
    for batch in file.iter_batches(1024):
        for row in batch.to_pylist():
            number += 1
            yield number, {key: _as_text(value) for key, value in row.items()}


def _check_names(source: str, names: list[str], needed: tuple[str, ...], hint: str) -> None:
    for column in needed:
        if column not in names:
            raise UnimetricError(f"`{source}` has no column `{column}`", hint)
    if "" in names:
        hint = "name it, or remove it: pandas writes its index with `to_csv(file)`, and leaves it out with `to_csv(file, index=False)`"
        raise UnimetricError(f"`{source}`: column {names.index('') + 1} has no name", hint)
    if len(set(names)) < len(names):
        raise UnimetricError(f"`{source}`: its columns must have different names", "rename them")


def _as_text(value: Any) -> str | None:
    """Return the value of a cell as in a csv file. Not a number is a missing value."""
    return None if value is None or value != value else str(value)


def is_parquet(source: str) -> bool:
    """Return whether a list is a parquet file, by its name."""
    return source.lower().endswith(".parquet")


def open_parquet(stream: IO[bytes], source: str) -> Any:
    """Return an open parquet file of pyarrow."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UnimetricError(f"{source}: parquet files require pyarrow", "pip install 'unimetric[parquet]'") from None
    return ParquetFile(stream)


def columns(
    path: str | Path, *kinds: Callable[[str], Any], header: int = 0, hint: str = "download the file again"
) -> list[tuple[Any, ...]]:
    """Read a text file of columns separated by white space, and convert each column.

    The last column takes the rest of a line.

    Args:
        path: Path of the file.
        kinds: One conversion function per column.
        header: Number of lines to skip.
        hint: What to do if the file cannot be read.
    """
    try:
        with open_file(str(path)) as stream:
            lines = stream.read().decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UnimetricError(f"cannot read `{path}`: {error}", hint) from None
    rows = []
    for number, line in enumerate(lines[header:], header + 1):
        if not line.strip():
            continue
        words = line.strip().split(None, len(kinds) - 1)
        try:
            rows.append(tuple(kind(word) for kind, word in zip(kinds, words, strict=True)))
        except ValueError:
            wanted = " ".join(f"<{kind.__name__}>" for kind in kinds)
            raise UnimetricError(f"`{path}`, line {number}: cannot read `{line[:100]}`", f"a line should be: {wanted}") from None
    return rows


def matlab(path: Path, *keys: str) -> list[np.ndarray]:
    """Read variables of a .mat file as flat arrays."""
    from scipy.io import loadmat

    try:
        found = loadmat(str(path), variable_names=list(keys))
    except Exception as error:  # scipy raises many types for a broken file
        raise UnimetricError(
            f"cannot read `{path}`: {error}", "download the file again; it should be a MATLAB file of version 7.2 or older"
        ) from None
    for key in keys:
        if key not in found:
            raise UnimetricError(f"`{path}` has no variable `{key}`", "download the official file again")
    return [found[key].ravel() for key in keys]


def pictures(folder: Path) -> list[str]:
    """List the images below a folder, relative to it and sorted.

    Hidden files and folders are skipped. Links to missing images and images of other formats are skipped with a warning.
    """
    found: dict[str, list[str]] = {"image": [], "broken": [], "unread": []}
    waiting: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", ())]
    while waiting:
        inner, above = waiting.pop()
        try:
            here = identify(os.stat(folder / inner))
            if here in above:
                _reject_loop(folder / inner)
            with os.scandir(folder / inner) as entries:
                for entry in entries:
                    kind = classify(entry)
                    if kind == "folder":
                        waiting.append((f"{inner}{entry.name}/", (*above, here)))
                    elif kind:
                        found[kind].append(inner + entry.name)
        except OSError as error:
            raise UnimetricError(f"cannot list `{folder / inner}`: {error.strerror}", "check its permissions and links") from None
    for kind, what in (("broken", "links to missing images"), ("unread", "images of other formats")):
        if names := found[kind]:
            message = "%s: %s %s are skipped, the first is `%s`"
            logging.getLogger("unimetric").warning(message, folder, f"{len(names):,}", what, min(names))
    return sorted(found["image"])


def classify(entry: os.DirEntry[str]) -> str:
    """Return the kind of an entry: `image`, `folder`, `broken`, `unread`, or "" to skip it.

    A broken entry is a link to a missing image.
    """
    image = entry.name.lower().endswith(SUFFIXES)
    try:
        if entry.name.startswith("."):
            return ""
        if image and entry.is_file():
            return "image"
        if entry.is_dir():
            return "folder"
        if entry.name.lower().endswith(UNREAD):
            return "unread"
        return "broken" if image and entry.is_symlink() and not os.path.exists(entry) else ""
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return "broken" if image else ""  # a link to itself


def identify(status: os.stat_result) -> tuple[int, int]:
    """Return numbers that no other folder has."""
    return status.st_dev, status.st_ino


def _reject_loop(folder: Path) -> NoReturn:
    """Raise an error that names the link which leads from a folder back to itself."""
    link = next((path for path in (folder, *folder.parents) if path.is_symlink()), folder)
    raise UnimetricError(f"a link must not lead to a folder that holds it, got `{link}`", f"remove the link: `rm {shlex.quote(str(link))}`")
