"""The one error of the house: what failed, where, and what to type instead."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches

#: What the system says where a disk, or a user's share of it, is full.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UnimetricError(Exception):
    """A mistake that the user can mend. The command line prints it and leaves with exit code 2.

    Args:
        message: what is wrong, naming the file or the key.
        hint: what to type instead; may be empty.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)  # both, so that the error survives a pickle between processes
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n\nhint: {self.hint}" if self.hint else self.message


class Interrupted(Exception):
    """A signal asked a run to stop; its checkpoint is written. The command line leaves with exit code 130."""


def closest(word: str, known: Iterable[str]) -> str:
    """A hint with the nearest known spelling, or with everything that is known.

    >>> closest("epoch", ["epochs", "seed"])
    'did you mean `epochs`?'
    """
    known = sorted(known)
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{near[0]}`?"
    return "known: " + ", ".join(known) if known else ""
