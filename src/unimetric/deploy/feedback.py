"""Votes on search results: one line of JSON each, on disk before the answer is sent."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unimetric.errors import UnimetricError
from unimetric.files import sync_folder, write_bytes
from unimetric.report.escape import csv_text, for_csv

FILE, IMAGES = "feedback.jsonl", "feedback"
_COLUMNS = ("time", "query", "match", "vote", "score", "label", "version")


class Feedback:
    """The votes on the results of an index.

    Args:
        folder: Folder of `feedback.jsonl`, and of the images in `feedback/` that were searched with.
    """

    def __init__(self, folder: Path) -> None:
        self.file, self.images = folder / FILE, folder / IMAGES
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise an error if votes cannot be written."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._open().close()
        except OSError as error:
            raise UnimetricError(f"{self.file}: cannot be written: {error.strerror}", "use `--feedback FOLDER`") from None

    def _open(self) -> io.FileIO:
        fresh = not self.file.exists()
        file = open(self.file, "ab+", buffering=0)  # noqa: SIM115
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":  # a process was killed in the middle of a line
                file.write(b"\n")
        if fresh:
            sync_folder(self.file.parent)
        return file

    def save_image(self, data: bytes, kind: str) -> str:
        """Write an image that was searched with, once, and return its path.

        Args:
            data: Content of the file.
            kind: Format of Pillow, such as `JPEG`.
        """
        path = self.images / f"{hashlib.sha256(data).hexdigest()[:32]}.{kind.lower().replace('jpeg', 'jpg')}"
        with self._lock:  # votes on two results of an upload may arrive together
            if not path.exists():
                write_bytes(path, data)
        return str(path)

    def append(self, vote: dict[str, Any]) -> None:
        """Write a vote. It is on disk when this returns."""
        line = json.dumps(vote, ensure_ascii=True).encode() + b"\n"
        with self._lock, self._open() as file:
            if file.write(line) < len(line):  # the disk is full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.file))
            os.fsync(file.fileno())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.file.is_file():
            return
        with open(self.file, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    vote = json.loads(line)
                except ValueError:  # a line that was not acknowledged
                    continue
                if isinstance(vote, dict):
                    yield vote

    def as_csv(self) -> str:
        """Return all votes as csv text. The last vote on a pair counts."""
        last: dict[tuple[str, str], dict[str, Any]] = {}
        for vote in self:
            last[str(vote.get("query")), str(vote.get("match"))] = vote
        valid = [vote for vote in last.values() if vote.get("vote")]  # a vote that was taken back is empty
        rows = [[for_csv(str(vote[key])) if vote.get(key) is not None else "" for key in _COLUMNS] for vote in valid]
        return csv_text([_COLUMNS, *rows])
