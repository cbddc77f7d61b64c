"""Images in tar files, as part of a path: `shoes.tar::000000001536+4821:boot.jpg`.

The path holds the position and the number of bytes, so an image is read without its neighbors and without a list of the file.
Positions have leading zeros, so sorted paths are in the order of the file.
"""

from __future__ import annotations

import re

from unimetric.errors import UnimetricError

#: File, position of the first byte, and number of bytes.
Member = tuple[str, int, int]

_MEMBER = re.compile(r"(.+\.tar)::(\d{12})\+(\d+):[^/]*", re.DOTALL | re.IGNORECASE)
#: Bytes of the header before each member, and its field with the number of bytes.
_HEADER, _LENGTH = 512, slice(124, 136)


def split_member(path: str) -> Member | None:
    """Return file, position and number of bytes of a path, or None for another path.

    >>> split_member("shoes.tar::000000001536+4821:boot.jpg"), split_member("boot.jpg")
    (('shoes.tar', 1536, 4821), None)
    """
    found = _MEMBER.fullmatch(path) if "::" in path else None
    return None if found is None else (found[1], int(found[2]), int(found[3]))


def join_member(file: str, position: int, length: int, name: str) -> str:
    """Return the path of a member of a tar file."""
    return f"{file}::{position:012d}+{length}:{name}"


def span_of(member: Member) -> tuple[int, int]:
    """Return position and number of bytes of a member with its header."""
    return max(0, member[1] - _HEADER), _HEADER + member[2]


def check_member(data: bytes, member: Member) -> bytes:
    """Return the content of a member of a tar file.

    Args:
        data: Bytes of `span_of`.
        member: Result of `split_member`.

    Raises:
        UnimetricError: No member of this length is there, because the file was replaced.
    """
    path, _, length = member
    stored = data[:_HEADER][_LENGTH].strip(b"\0 ")
    if len(data) != _HEADER + length or not stored.isdigit() or b"8" in stored or b"9" in stored or int(stored, 8) != length:
        raise UnimetricError(f"{path}: was changed since its list was made", "open the dataset again, or restore the file")
    return data[_HEADER:]
