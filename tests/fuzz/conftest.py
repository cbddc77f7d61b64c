"""Random damage, and a command line that must answer it with a sentence.

python -m pytest tests/fuzz                  # about 500 cases, the same every time
UNIMETRIC_FUZZ=20 python -m pytest tests/fuzz    # 20 times as many, other ones every time
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from unimetric.cli import main

#: Longest time of a case in seconds.
LIMIT = 20

FACTOR = int(os.environ.get("UNIMETRIC_FUZZ", "1"))

#: Numbers that lie on an edge: of bytes, of integers, of what fits into memory.
_BYTES = st.sampled_from(
    [b"\x00", b"\xff", b"\xff" * 4, b"\x00" * 8, b"\xff\xff\xff\xff\xff\xff\xff\x7f", b"{}", b"[]", b'"', b"\n", b"-1"]
)

#: Pieces of text with a meaning in TOML, in a spec string or in a path.
_PIECES = st.sampled_from(
    [
        *"()[]{}=,;:'\"#\\.\n\t\0 é\u2028\ud7ff",
        *(
            "..",
            "[[",
            '"""',
            "**",
            "k=",
            "0",
            "-1",
            "nan",
            "inf",
            "1e999",
            "-0.0",
            "1_000",
            "0x1F",
            "True",
            "None",
            "{0:1}",
            "margin",
            "train:",
        ),
        *("os.system", "__import__('os')", "lambda: 0", "pack(path='/dev/zero')", "folder(root='/')"),
        *("9" * 400, "9" * 5000, "(" * 300, "a." * 3000, "x" * 5000),
    ]
)


def cases(share: int) -> Callable[[Any], Any]:
    """Return the settings of a test with `share` of the cases."""
    return settings(
        max_examples=share * FACTOR,
        deadline=None,
        derandomize=FACTOR == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate] if FACTOR == 1 else list(Phase),  # shrinking a failure takes minutes
    )


#: One change of a file: what is done, at which fraction of it, to how many bytes, and with what.
Change = tuple[str, float, int, Any]

byte_changes: st.SearchStrategy[list[Change]] = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "truncate", "insert", "repeat", "overwrite"]),
        st.floats(0, 1),
        st.sampled_from([1, 4, 16, 256]),
        st.one_of(_BYTES, st.binary(min_size=1, max_size=16)),
    ),
    min_size=1,
    max_size=4,
)

text_changes: st.SearchStrategy[list[Change]] = st.lists(
    st.tuples(
        st.sampled_from(["cut", "insert", "repeat", "overwrite"]),
        st.floats(0, 1),
        st.integers(0, 12),
        st.one_of(_PIECES, st.text(max_size=5)),
    ),
    min_size=1,
    max_size=3,
)


def damage(data: Any, changes: list[Change]) -> Any:
    """Apply changes to bytes or text."""
    for action, fraction, size, piece in changes:
        place = int(fraction * len(data))
        end = min(len(data), place + size)
        if action == "flip" and data:
            place = min(place, len(data) - 1)
            data = data[:place] + bytes([data[place] ^ (1 << piece[0] % 8)]) + data[place + 1 :]
        elif action == "truncate":
            data = data[:place]
        elif action == "cut":
            data = data[:place] + data[end:]
        elif action == "insert":
            data = data[:place] + piece + data[place:]
        elif action == "repeat":
            data = data[:end] + data[place:]
        elif action == "overwrite":
            data = data[:place] + piece + data[place + len(piece) :]
    return data


@contextlib.contextmanager
def within_limit() -> Iterator[None]:
    """Fail if the body takes longer than `LIMIT` seconds."""

    def stop(*_: object) -> None:
        raise AssertionError(f"no answer within {LIMIT} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def answer(*words: object) -> tuple[int, str]:
    """Run a command in this process, and return its exit code and its output.

    Any exception but the end of the command fails the test: on the command line it would be a traceback. So does an error without a
    sentence, and a code that is neither success nor bad input.
    """
    out = io.StringIO()
    with (
        within_limit(),
        mock.patch.object(sys, "argv", ["unimetric", *(str(word).replace("\0", "") for word in words)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
    ):
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
    text = out.getvalue()
    assert code in (0, 2), text
    assert "Traceback" not in text, text
    if code:
        assert "error" in text.lower(), text
    return code, text


@pytest.fixture(scope="session")
def letters_file(letters: Path) -> bytes:
    return letters.read_bytes()
