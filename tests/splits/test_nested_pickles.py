"""Small pickles that would take years to read are rejected at once."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from unimetric.errors import UnimetricError
from unimetric.splits._file import read


def nested(kind: type, depth: int) -> Any:
    value: Any = kind(["a"])
    for _ in range(depth):
        value = kind([value, value])
    return value


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("as_key", [False, True])
def test_nested_references_are_rejected(protocol: int, as_key: bool, tmp_path: Path) -> None:
    inner = pickle.dumps(nested(tuple if as_key else list, 60), protocol)[:-1]
    # A dictionary whose key or value is the nested one. The pickle of 60 levels takes 1 KiB; hashing or copying it takes 2**60 steps.
    file = tmp_path / "splits.pkl"
    head = inner[:2] if protocol else b""
    body = inner[2:] if protocol else inner
    file.write_bytes(head + b"}" + (body + b"K\x01" if as_key else b"K\x01" + body) + b"s.")
    assert file.stat().st_size < 4096
    begun = time.monotonic()
    with pytest.raises(UnimetricError, match=r"splits\.pkl: .*(twice|many times)") as caught:
        read(str(file))
    assert caught.value.hint and time.monotonic() - begun < 60


@pytest.mark.parametrize("protocol", range(5))
def test_shared_names_are_read(protocol: int, tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(50)]
    content = {"1": {"train": names, "test": names[::-1], "fid": 3.5}, "2": {"train": names, "test": names}}
    (tmp_path / "splits.pkl").write_bytes(pickle.dumps(content, protocol))
    assert read(str(tmp_path / "splits.pkl")) == content
