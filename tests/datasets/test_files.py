"""Any folder of images, and csv files with any columns."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unimetric.datasets.files import column_types, read_csv, walk
from unimetric.errors import UnimetricError
from unimetric.spec import create


@pytest.fixture
def folder(tmp_path, plant):
    plant(tmp_path / "all", ["b/1.JPG", "b/2.gif", "a/deep/er/3.webp", "0.png", ".hidden/4.png", "a/.5.png"])
    (tmp_path / "all" / "notes.txt").write_text("not an image")
    return tmp_path / "all"


def test_walk_is_recursive_and_ordered(folder: Path) -> None:
    found = list(walk(folder))
    assert [each.id for each in found] == ["0.png", "a/deep/er/3.webp", "b/1.JPG", "b/2.gif"]
    assert [each.path for each in found] == [str(folder / each.id) for each in found]
    status = os.stat(folder / "b/1.JPG")
    assert (found[2].size, found[2].mtime) == (status.st_size, status.st_mtime_ns) and found[2].columns == {}
    assert [each.columns["label"] for each in walk(folder, labels=True)] == [None, "er", "b", "b"]


def test_walk_ends_in_loops_and_reports_folders(folder: Path) -> None:
    (folder / "b" / "up").symlink_to(folder)
    (folder / "a" / "gone").symlink_to(folder / "nowhere")
    (folder / "b" / "self").symlink_to(folder / "b" / "self")
    problems: list[str] = []
    assert len(list(walk(folder, problems=problems))) == 4 and not problems
    assert not list(walk(folder / "none", problems=problems)) and "cannot be listed" in problems[0]


def test_walk_lists_links_to_nothing(folder: Path) -> None:
    (folder / "b" / "gone.png").symlink_to(folder / "nowhere.png")
    (folder / "b" / "self.png").symlink_to(folder / "b" / "self.png")
    assert {each.id: each.size for each in walk(folder) if each.size < 0} == {"b/gone.png": -1, "b/self.png": -1}


def test_folder_and_files_list_the_same_images(tmp_path: Path, plant) -> None:
    names = [f"{label}/{number}{suffix}" for label in "ab" for number, suffix in enumerate((".gif", ".jp2", ".JPG", ".ppm"))]
    plant(tmp_path, names)
    for name in ("folder", "files"):
        assert create("datasets", f"{name}(root={str(tmp_path)!r})").paths == tuple(str(tmp_path / each) for each in names)


def test_table_has_classes_only_when_asked(folder: Path) -> None:
    table = create("datasets", f"files(root={str(folder)!r})")
    assert table.class_names == ("",) and len(table) == 4 and not table.train.any() and table.source_names == ("all",)
    table = create("datasets", f"files(root={str(folder)!r}, labels=True, name='mine')")
    assert [table.class_names[label] for label in table.labels] == ["", "er", "b", "b"] and table.source_names == ("mine",)
    (folder.parent / "empty").mkdir()
    with pytest.raises(UnimetricError, match="has no images"):
        create("datasets", f"files(root={str(folder.parent / 'empty')!r})")


def test_csv_columns_get_the_type_of_their_values(tmp_path: Path) -> None:
    file = tmp_path / "images.csv"
    file.write_text("path,label,price,weight,sale,code,empty\na.png,1,3,1,true,007,\n../b.png,2,,0.5,FALSE,8,\n", encoding="utf-8-sig")
    types = column_types(file)
    assert types == {"label": str, "price": int, "weight": float, "sale": bool, "code": str, "empty": str}
    first, second = read_csv(file, types)
    assert first.id == "a.png" and first.size == -1
    assert first.columns == {"label": "1", "price": 3, "weight": 1.0, "sale": True, "code": "007", "empty": None}
    assert second.id == second.path == str(tmp_path.parent / "b.png") and second.columns["price"] is None


def test_csv_reads_numbers_as_spreadsheets_write_them(tmp_path: Path) -> None:
    file = tmp_path / "images.csv"
    file.write_text("path,a,b,c,d,e,f\na.png,+5,.5,NaN,1e999,NaN,nan\nb.png,7,-.5,3,2,true,boot\nc.png,+0,+.5e1,,3,,nan\n")
    types = column_types(file)
    assert types == {"a": int, "b": float, "c": int, "d": str, "e": bool, "f": str}
    rows = [list(each.columns.values()) for each in read_csv(file, types)]
    assert rows == [[5, 0.5, None, "1e999", None, "nan"], [7, -0.5, 3, "2", True, "boot"], [0, 5.0, None, "3", None, "nan"]]
    file.write_text("path,a\na.png,+05\nb.png,+\nc.png,.\nd.png,-\ne.png,1_0\nf.png,inf\n")
    assert [each.columns["a"] for each in read_csv(file, column_types(file))] == ["+05", "+", ".", "-", "1_0", "inf"]
    assert [each.columns["a"] for each in read_csv(file, {"a": str})] == ["+05", "+", ".", "-", "1_0", "inf"]


def test_csv_accepts_addresses_of_local_files(tmp_path: Path, plant) -> None:
    plant(tmp_path / "ä b", ["1%.png", "2.png"])
    (tmp_path / "images.csv").write_text(f"path,label\nfile://{tmp_path}/%C3%A4%20b/1%25.png,a\nFILE://{tmp_path}/ä b/2.png,a\n")
    found = list(read_csv(tmp_path / "images.csv", {}))
    assert [each.id for each in found] == ["ä b/1%.png", "ä b/2.png"] and min(each.size for each in found) > 0
    assert create("datasets", f"csv(file={str(tmp_path / 'images.csv')!r})").paths == tuple(each.path for each in found)


def test_csv_keeps_every_digit_of_integers(tmp_path: Path) -> None:
    file = tmp_path / "images.csv"
    file.write_text(f"path,id,code\na.png,1234567890123456789,{2**63}\nb.png,{2**63 - 1},5\nc.png,{-(2**63)},{'1' * 5000}\n")
    types = column_types(file)
    assert types == {"id": int, "code": str}
    assert [each.columns["id"] for each in read_csv(file, types)] == [1234567890123456789, 2**63 - 1, -(2**63)]
    assert next(read_csv(file, types)).columns["code"] == str(2**63)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name\na.png\n", "no column `path`"),
        ("path,a,a\nx.png,1,2\n", "different names"),
        (",path\n0,x.png\n", "column 1 has no name"),
        ("path,a\nx.png,1,2\n", "line 2: more values than columns"),
        ('path,a\nx.png,1\ny.png,"2\nz.png,3\n', "line 3: unexpected end of data"),
        ("path,a\n,1\n", "line 2: the path is missing"),
        ("path\nx\0.png\n", "line 2: the path must not contain NUL"),
        ("path,price\nx.png,many\n", "line 2: `price` must hold integers, got `many`"),
    ],
)
def test_wrong_csv_is_one_sentence(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(UnimetricError, match=problem) as caught:
        column_types(tmp_path / "x.csv")
        list(read_csv(tmp_path / "x.csv", {"price": int}))
    assert "x.csv" in caught.value.message and caught.value.hint


def test_missing_or_binary_csv_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UnimetricError, match="does not exist"):
        column_types(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"path\n\xff\xfe\x00.png\n")
    with pytest.raises(UnimetricError, match="cannot read"):
        column_types(tmp_path / "binary.csv")
