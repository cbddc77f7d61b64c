"""The error type of Unimetric: the problem, its location, and what to type instead."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

#: Error numbers of the system for a full disk or an exceeded quota.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

#: Hint of an error about a damaged file of an index. The folder must be removed, because a build of an existing index reads its
#: files first.
DAMAGED_INDEX = "restore the index from a copy, or remove its folder and build it again"


class UnimetricError(Exception):
    """Mistake that the user can fix. The command line prints it and exits with code 2.

    Args:
        message: Problem, with the file or the key.
        hint: What to type instead. May be empty.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        message, hint = hide_passwords(message), hide_passwords(hint)
        super().__init__(message, hint)  # both, so that the error survives a pickle between processes
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n\nhint: {self.hint}" if self.hint else self.message


class NotFound(UnimetricError):
    """Name of something that does not exist, such as the id of a deleted image."""


class Unavailable(UnimetricError):
    """Failure of a database or a disk. The same request may succeed later."""


@contextmanager
def locating(place: str) -> Iterator[None]:
    """Put the place of a mistake before the message of its error."""
    try:
        yield
    except UnimetricError as error:
        raise UnimetricError(f"{place}: {error.message}", error.hint) from error.__cause__


def counted(number: int, word: str) -> str:
    """Return a number of things.

    >>> counted(1, "image"), counted(2000, "image")
    ('1 image', '2,000 images')
    """
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def hide_passwords(text: str) -> str:
    """Return a text without the passwords of connection strings.

    >>> hide_passwords("postgresql://me:secret@host/db and password=secret")
    'postgresql://me:***@host/db and password=***'
    """
    return re.sub(r"(://[^\s:/@'\"]*:)[^\s'\"]+@|(\bpassword\s*=\s*)(?:'[^']*'|[^\s&'\")]+)", _masked, text, flags=re.IGNORECASE)


def _masked(found: re.Match[str]) -> str:
    return f"{found[1]}***@" if found[1] else f"{found[2]}***"


class Interrupted(Exception):
    """Stop of a run by a signal, after its checkpoint was written.

    The command line exits with code 130.
    """


def explain(error: Exception) -> UnimetricError | None:
    """Return what the user can do about an error, or None if it is not a mistake of the user.

    A full disk and too little memory have errors of other types. PyTorch has a type of its own for the memory
    of a GPU, and none for that of a CPU.

    >>> explain(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.")).message
    'the memory is too small: not enough memory: you tried to allocate 8 bytes'
    >>> explain(RuntimeError("shapes do not match"))
    """
    if isinstance(error, UnimetricError):
        return error
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        return UnimetricError(f"{error.filename or 'the output'}: cannot be written: {error.strerror}", "free some disk space")
    text = str(error).partition("\n")[0]
    _, allocator, reason = text.partition("DefaultCPUAllocator: ")
    if type(error).__name__ == "OutOfMemoryError":
        problem = f"the memory of the GPU is too small: {'. '.join(text.split('. ')[:2])}"
    elif allocator or isinstance(error, MemoryError):
        problem = f"the memory is too small: {reason or text or 'not enough memory'}"
    else:
        return None
    hint = "use a smaller `batch_size`, `evaluate_batch` or network, `residence = 'host'`, or `objective = \"cached(...)\"`"
    return UnimetricError(problem.rstrip("."), hint)


def first_line(error: BaseException) -> str:
    """Return the first line of an error of another package, shortened, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def closest(word: str, known: Iterable[str]) -> str:
    """Return a hint with the closest known spelling, or else with all known words.

    >>> closest("epoch", ["epochs", "seed"])
    'did you mean `epochs`?'
    """
    known = sorted(known)
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{near[0]}`?"
    return "known: " + ", ".join(known) if known else ""
