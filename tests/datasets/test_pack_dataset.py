from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from unimetric.errors import UnimetricError
from unimetric.images.pack import decode
from unimetric.images.packing import write
from unimetric.images.table import Table
from unimetric.spec import create


def test_pack_is_a_dataset(tmp_path: Path) -> None:
    colours = {"a": 10, "b": 20, "c": 30}
    table = Table(paths=tuple(colours), labels=np.array([0, 0, 1]), class_names=("x", "y"), train=np.array([True, True, False]))
    write(tmp_path / "a.pack", table, encoding="raw", read=lambda path: np.full((2, 3, 3), colours[path], np.uint8))
    found = create("datasets", f"pack(path={str(tmp_path / 'a.pack')!r})")
    np.testing.assert_array_equal(found.labels, table.labels)
    np.testing.assert_array_equal(found.train, table.train)
    assert found.class_names == table.class_names
    assert [int(decode(path)[0, 0, 0]) for path in found.paths] == list(colours.values())


def test_altered_pack_is_no_dataset(tmp_path: Path) -> None:
    table = Table(paths=("a",), labels=np.array([0]), class_names=("x",), train=np.array([True]))
    write(tmp_path / "a.pack", table, encoding="raw", read=lambda path: np.zeros((2, 3, 3), np.uint8))
    data = bytearray((tmp_path / "a.pack").read_bytes())
    data[12] ^= 1
    (tmp_path / "a.pack").write_bytes(bytes(data))
    with pytest.raises(UnimetricError, match=r"a\.pack: its images were modified"):
        create("datasets", f"pack(path={str(tmp_path / 'a.pack')!r})")
