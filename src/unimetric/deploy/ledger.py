"""The files of an index: what was read, when, and what has changed since.

The ledger is a SQLite database next to the store. Images are marked in it before the store is written, and recorded
afterwards. If a kill leaves marks, these images are embedded and stored again under the same ids, or deleted if their files
are gone. The listing of a source and its differences to the ledger are temporary tables, so memory does not grow with the
number of files.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unimetric.datasets.files import ImageFile
from unimetric.errors import DAMAGED_INDEX, UnimetricError

_TABLES = """
create table if not exists folders (id integer primary key, path text not null unique);
create table if not exists files (
    folder integer not null, name text not null, size integer not null, mtime integer not null,
    digest blob, columns blob, reason text, primary key (folder, name)
) without rowid;
create temp table if not exists listed (
    folder integer not null, name text not null, size integer not null, mtime integer not null,
    columns text, hash blob, primary key (folder, name)
) without rowid;
"""
#: Listed files that are new or differ. `known` is the digest of the stored image if only the time of the file is different. Such
#: files come last, because most of them are not embedded, and others then fill their batches.
_DIFFERENCES = """
create temp table work as
    select listed.folder as folder, listed.name as name, listed.size as size, listed.mtime as mtime, listed.columns as columns,
           listed.hash as hash, coalesce(files.size, -2) = -2 as fresh,
           case when files.size = listed.size and files.reason is null then files.digest end as known,
           files.name is not null and files.columns is not listed.hash as altered,
           files.name is not null and files.size = listed.size and files.mtime = listed.mtime as same,
           files.reason is not null as failed
    from listed left join files on files.folder = listed.folder and files.name = listed.name
    where files.name is null or files.size <> listed.size or files.mtime <> listed.mtime
          or (files.columns is not listed.hash and files.reason is null)
    order by known is not null, listed.folder, listed.name;
create temp table gone as
    select files.folder as folder, files.name as name, files.reason is not null as failed
    from files left join listed on files.folder = listed.folder and files.name = listed.name
    where listed.name is null;
"""

#: Errors of a database. One whose message has a damaged byte of the file is not of SQLite.
_DAMAGE = (sqlite3.Error, UnicodeDecodeError)
#: Columns of a file as text. `json.dumps` with arguments takes twice the time, because it makes an encoder per call.
_to_text = json.JSONEncoder(ensure_ascii=False, sort_keys=True).encode


@dataclass(frozen=True)
class Work:
    """A listed file that is new or may have changed.

    Args:
        id: Id of the image.
        size, mtime: Size and time of the file.
        columns: Values of its columns.
        hash: Digest of the columns; None without columns.
        fresh: Whether the file is new.
        known: Digest of the stored image, if the file may be unchanged.
        altered: Whether its columns have changed.
        same: Whether size and time are unchanged: only the columns have changed.
        failed: Whether the file could not be read last time.
    """

    id: str
    size: int
    mtime: int
    columns: dict[str, Any]
    hash: bytes | None
    fresh: bool
    known: bytes | None
    altered: bool
    same: bool
    failed: bool


def split_id(id_: str) -> tuple[str, str]:
    """Return folder and name of an id.

    >>> split_id("a/b/c.jpg"), split_id("c.jpg")
    (('a/b/', 'c.jpg'), ('', 'c.jpg'))
    """
    folder, slash, name = id_.rpartition("/")
    return folder + slash, name


class Ledger:
    """Size, time and digest of every file of an index.

    Args:
        path: Database. It is created if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._base = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._base.execute("pragma journal_mode = delete")
            self._base.execute("pragma temp_store = file")
            self._base.executescript(_TABLES)
        except _DAMAGE as error:
            raise UnimetricError(f"{path}: cannot be opened: {error}", DAMAGED_INDEX) from None
        self._folders: dict[str, int] = {}

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise an error with the path and a hint if the database fails.

        It may be damaged, or the disk of its temporary tables may be full.
        """
        try:
            yield
        except _DAMAGE as error:
            full = "full" in str(error) or "I/O" in str(error)
            hint = "free some space, also in the folder of temporary files (`TMPDIR`)" if full else DAMAGED_INDEX
            raise UnimetricError(f"{self.path}: cannot be used: {error}", hint) from None

    def close(self) -> None:
        """Close the database."""
        self._base.close()

    def _folder(self, path: str) -> int:
        """Return the number of a folder. The numbers of recent folders are kept."""
        if path not in self._folders:
            if len(self._folders) > 4096:
                self._folders.clear()
            self._base.execute("insert or ignore into folders (path) values (?)", (path,))
            self._folders[path] = self._base.execute("select id from folders where path = ?", (path,)).fetchone()[0]
        return self._folders[path]

    def compare(self, listing: Iterable[ImageFile]) -> tuple[int, int, list[tuple[str, str]]]:
        """List a source and find what differs.

        Args:
            listing: Files of the source.

        Returns:
            The number of files to read, the number of files that are gone, and names and reasons of files that cannot
            have an id.
        """
        self._base.executescript("delete from listed; drop table if exists work; drop table if exists gone;")
        problems: list[tuple[str, str]] = []
        latest = ""

        def rows() -> Iterator[list[Any]]:
            nonlocal latest
            for file in listing:
                latest, what = file.id, "its name"
                text = _to_text(file.columns) if file.columns else None
                try:
                    file.id.encode()
                    what = "one of its columns"
                    hash_ = None if text is None else hashlib.blake2b(text.encode(), digest_size=8).digest()
                except UnicodeEncodeError:
                    problems.append((file.id, f"{what} is not UTF-8"))
                    continue
                yield [*self._place(file.id), file.size, file.mtime, text, hash_]

        with self.transaction():
            try:
                self._base.executemany("insert into listed values (?, ?, ?, ?, ?, ?)", rows())
            except sqlite3.IntegrityError:
                raise UnimetricError(f"`{latest}` is listed twice", "list an image once") from None
        self._base.executescript(_DIFFERENCES)
        work, gone = (self._base.execute(f"select count(*) from {name}").fetchone()[0] for name in ("work", "gone"))
        return work, gone, problems

    def work(self) -> Iterator[Work]:
        """Yield the new and different files of the last comparison.

        Files that must be embedded come first, folder by folder.
        """
        query = (
            "select work.rowid, folders.path || work.name, size, mtime, columns, hash, fresh, known, altered, same, failed "
            "from work join folders on folders.id = work.folder where work.rowid > ? order by work.rowid limit ?"
        )
        for rows in self._pages(query, 1024):
            for _, id_, size, mtime, columns, hash_, fresh, known, altered, same, failed in rows:
                values = json.loads(columns) if columns else {}
                yield Work(id_, size, mtime, values, hash_, bool(fresh), known, bool(altered), bool(same), bool(failed))

    def gone(self) -> Iterator[list[str]]:
        """Yield the ids of files that are no longer listed, some at a time."""
        query = (
            "select gone.rowid, folders.path || gone.name from gone join folders on folders.id = gone.folder "
            "where gone.rowid > ? order by gone.rowid limit ?"
        )
        for rows in self._pages(query, 4096):
            yield [id_ for _, id_ in rows]

    def _pages(self, query: str, size: int) -> Iterator[list[tuple[Any, ...]]]:
        """Yield the rows of a query, which starts after a rowid. Other queries may run in between."""
        last = 0
        while rows := self._base.execute(query, (last, size)).fetchall():
            yield rows
            last = rows[-1][0]

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit the changes of a block together, or none of them."""
        try:
            with self._base:  # commits, or rolls back after an error
                self._base.execute("begin")
                yield
        except sqlite3.OperationalError as error:  # others are of a damaged database; see `explained`
            raise UnimetricError(f"{self.path}: cannot be written: {error}", "free some space, or use another disk") from None

    def mark(self, ids: Sequence[str]) -> None:
        """Store that images are about to be written or deleted.

        They are marked until they are recorded or forgotten. No file has the size of a mark, which is -2 for images that
        the store did not hold before.
        """
        self._change(
            "insert into files values (?, ?, -2, -1, null, null, null) on conflict do update "
            "set size = case when reason is null and size <> -2 then -3 else -2 end, "
            "mtime = -1, digest = null, columns = null, reason = null",
            ((id_,) for id_ in ids),
        )

    def mark_columns(self, works: Sequence[Work]) -> None:
        """Store that columns of images are about to be written.

        No columns have the digest of a mark.
        """
        self._change("update files set columns = x'' where folder = ? and name = ?", ((work.id,) for work in works))

    def record(self, done: Sequence[tuple[Work, bytes | None, str | None, int]]) -> None:
        """Store what was read.

        Args:
            done: For each file its listing, the digest of its content, why it could not be read (None if it could), and the time
                to store for it.
        """
        rows = ((work.size, mtime, digest, work.hash, reason, work.id) for work, digest, reason, mtime in done)
        self._change("insert or replace into files (size, mtime, digest, columns, reason, folder, name) values (?, ?, ?, ?, ?, ?, ?)", rows)

    def record_columns(self, works: Sequence[Work]) -> None:
        """Store that the columns of images were written."""
        self._change("update files set columns = ? where folder = ? and name = ?", ((work.hash, work.id) for work in works))

    def size(self) -> int:
        """Return the number of files that were read, those that could not be read among them."""
        return int(self._base.execute("select count(*) from files").fetchone()[0])

    def forget(self, ids: Sequence[str]) -> None:
        """Remove files that are gone."""
        self._change("delete from files where folder = ? and name = ?", ((id_,) for id_ in ids))

    def _change(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Run a statement for each row, which ends with an id.

        The folder and the name of the id are its last two parameters.
        """
        with self.transaction():
            self._base.executemany(statement, (values + self._place(id_) for *values, id_ in rows))

    def _place(self, id_: str) -> list[Any]:
        """Return the number of the folder of an id, and its name."""
        folder, name = split_id(id_)
        return [self._folder(folder), name]

    def unreadable(self) -> Iterator[tuple[str, str]]:
        """Yield id and reason of every file that could not be read."""
        yield from self._base.execute(
            "select folders.path || files.name, reason from files join folders on folders.id = files.folder where reason is not null"
        )

    def compact(self) -> None:
        """Give unused space back."""
        with self.transaction():
            self._base.execute("delete from folders where id not in (select folder from files)")
        self._folders.clear()
        free, pages = (self._base.execute(f"pragma {name}").fetchone()[0] for name in ("freelist_count", "page_count"))
        if 10 * free > pages:
            self._base.execute("vacuum")
