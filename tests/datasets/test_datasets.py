"""What the readers share: where files lie, how they are read, and what every dataset documents."""

import inspect
import re

import numpy as np
import pytest

from unimetric.datasets import columns, locate, matlab, pictures, place, tabulate
from unimetric.datasets.files import walk
from unimetric.errors import UnimetricError
from unimetric.spec import create, find, names

MINE = ["aircraft", "cars196", "csv", "cub200", "dogs", "files", "flowers102", "folder", "inshop", "nabirds", "sop", "tar", "union"]
OFFICIAL = [name for name in MINE if name not in ("csv", "files", "folder", "tar", "union")]


@pytest.mark.parametrize("name", MINE)
def test_contract(name):
    assert name in names("datasets")
    part = find("datasets", name)
    documentation = inspect.getdoc(part)
    described = documentation.split("Args:")[1]
    for parameter in inspect.signature(part).parameters.values():
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert parameter.annotation is not parameter.empty
        assert re.search(rf"^\s+{parameter.name}: \S", described, re.MULTILINE), parameter.name
    assert re.search(r"\(.*(19|20)\d\d\)", documentation), "cites its source"


@pytest.mark.parametrize("name", OFFICIAL)
def test_missing_folder_is_one_sentence_and_a_hint(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnimetricError, match=rf"{name}: the folder `data/.*` does not exist") as caught:
        create("datasets", name)
    assert f"{name}(root='...')" in caught.value.hint and "UNIMETRIC_DATA" in caught.value.hint and "it holds" in caught.value.hint


@pytest.mark.parametrize("name", OFFICIAL)
def test_empty_folder_says_which_file_lacks(name, tmp_path):
    with pytest.raises(UnimetricError, match="does not exist") as caught:
        create("datasets", f"{name}(root={str(tmp_path)!r})")
    assert str(tmp_path) in caught.value.message and "should hold" in caught.value.hint


def test_environment_replaces_a_leading_data(monkeypatch, tmp_path):
    (tmp_path / "dogs").mkdir()
    monkeypatch.setenv("UNIMETRIC_DATA", str(tmp_path))
    assert locate("data/dogs", "dogs") == tmp_path / "dogs"
    assert place("elsewhere/dogs").as_posix() == "elsewhere/dogs"
    assert place("/data/dogs").as_posix() == "/data/dogs"
    assert place("database/dogs").as_posix() == "database/dogs"


def test_root_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnimetricError, match="is not a folder"):
        locate(str(tmp_path / "file"), "cub200")


def test_pictures_by_suffix_in_any_case_and_nothing_hidden(tmp_path, plant):
    wanted = ["a/1.jpg", "a/2.JPEG", "a/3.Png", "b/c/4.webp", "b/5.bmp", "b/6.tif", "b/7.TIFF"]
    plant(tmp_path, [*wanted, "a/notes.txt", "a/.hidden.jpg", ".cache/8.jpg", "a/noending", "a/jpg"])
    (tmp_path / "folder.jpg").mkdir()  # a folder that is called like a picture
    plant(tmp_path, ["folder.jpg/9.png"])
    assert pictures(tmp_path) == sorted([*wanted, "folder.jpg/9.png"])


def test_pictures_follow_links_and_survive_a_circle(tmp_path, plant):
    plant(tmp_path / "real", ["1.jpg"])
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "class").symlink_to(tmp_path / "real")
    assert pictures(tmp_path / "root") == ["class/1.jpg"]
    (tmp_path / "real" / "circle").symlink_to(tmp_path / "real")
    with pytest.raises(UnimetricError, match=r"must not lead to a folder that holds it, got `.*/class/circle`") as caught:
        pictures(tmp_path / "root")
    assert caught.value.hint.endswith("root/class/circle`")


def test_pictures_end_in_many_loops(tmp_path, plant):
    for name in "abc":
        plant(tmp_path / "root" / name, ["1.jpg"])
        for other in "abc":
            (tmp_path / "root" / name / f"to_{other}").symlink_to(tmp_path / "root" / other)
    (tmp_path / "root" / "up").symlink_to(tmp_path)
    with pytest.raises(UnimetricError, match="must not lead to a folder that holds it"):
        pictures(tmp_path / "root")


def test_pictures_warn_of_images_in_other_formats(tmp_path, plant, caplog):
    plant(tmp_path, ["a/1.jpg", "a/notes.txt", "a/.hidden.heic"])
    assert pictures(tmp_path) == ["a/1.jpg"] and not caplog.text
    plant(tmp_path, ["a/2.HEIC", "b/3.jfif"])
    assert pictures(tmp_path) == ["a/1.jpg"] and [each.id for each in walk(tmp_path)] == ["a/1.jpg"]
    assert "2 images of other formats are skipped, the first is `a/2.HEIC`" in caplog.text


def test_pictures_warn_of_broken_links(tmp_path, plant, caplog):
    plant(tmp_path, ["a/1.jpg"])
    for name in ("loop", "a/loop.jpg", "a/gone.jpg"):
        (tmp_path / name).symlink_to(tmp_path / (name if "loop" in name else "nowhere"))
    assert pictures(tmp_path) == ["a/1.jpg"]
    assert "2 links to missing images are skipped, the first is `a/gone.jpg`" in caplog.text


@pytest.mark.parametrize(("text", "line"), [("1 a\nno number\n", 2), ("1 a\n\n2\n", 3)])
def test_malformed_line_is_named(tmp_path, text, line):
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(UnimetricError, match=f"line {line}") as caught:
        columns(tmp_path / "list.txt", int, str)
    assert caught.value.hint == "a line should be: <int> <str>"


def test_columns_keep_spaces_of_the_last_and_pass_over_a_header(tmp_path):
    (tmp_path / "list.txt").write_text("id name\r\n 1   Oak Titmouse \r\n\r\n2 b\r\n")
    assert columns(tmp_path / "list.txt", int, str, header=1) == [(1, "Oak Titmouse"), (2, "b")]


def test_text_that_is_no_text(tmp_path):
    (tmp_path / "list.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnimetricError, match="cannot read"):
        columns(tmp_path / "list.txt", str)


def test_broken_matlab_file(tmp_path):
    from scipy.io import savemat

    (tmp_path / "broken.mat").write_bytes(b"no matlab file" * 40)
    with pytest.raises(UnimetricError, match="cannot read"):
        matlab(tmp_path / "broken.mat", "labels")
    savemat(tmp_path / "other.mat", {"marks": [1, 2]})
    with pytest.raises(UnimetricError, match="has no variable `labels`"):
        matlab(tmp_path / "other.mat", "labels")


def test_absent_pictures(tmp_path, plant, caplog):
    plant(tmp_path, ["a/1.jpg", "b/2.jpg"])
    paths = [f"{tmp_path}/{name}" for name in ("a/1.jpg", "a/lost.jpg", "b/2.jpg", "c/lost.jpg")]
    arguments = ("toy", paths, [1, 1, 2, 2], {1: "one", 2: "two"}, [True, True, False, False])
    with pytest.raises(UnimetricError, match=r"toy: 2 of 4 listed images are missing, the first is `.*a/lost.jpg`") as caught:
        tabulate(*arguments)
    assert "on_missing='skip'" in caught.value.hint
    table = tabulate(*arguments, on_missing="skip")
    assert table.paths == (paths[0], paths[2])
    assert table.labels.tolist() == [0, 1] and table.train.tolist() == [True, False]
    assert "2 of 4 listed images are missing" in caplog.text
    with pytest.raises(UnimetricError, match="`on_missing` must be one of `error`, `skip`, got 'skpi'") as caught:
        tabulate(*arguments, on_missing="skpi")
    assert "`skip`" in caught.value.hint


def test_nothing_there_is_an_error_even_when_skipping(tmp_path):
    with pytest.raises(UnimetricError, match="1 of 1 listed"):
        tabulate("toy", [f"{tmp_path}/lost.jpg"], [1], {1: "one"}, [True], on_missing="skip")


def test_annotations_that_do_not_fit(tmp_path, plant):
    plant(tmp_path, ["1.jpg"])
    path = [f"{tmp_path}/1.jpg"]
    with pytest.raises(UnimetricError, match="the class 7, which has no name"):
        tabulate("toy", path, [7], {1: "one"}, [True])
    with pytest.raises(UnimetricError, match="two classes have the same name"):
        tabulate("toy", path, [1], {1: "one", 2: "one"}, [True])
    with pytest.raises(UnimetricError, match="no images are listed"):
        tabulate("toy", [], [], {1: "one"}, [])


def test_every_picture_asks_and_answers_unless_told(tmp_path, plant):
    plant(tmp_path, ["1.jpg"])
    table = tabulate("toy", [f"{tmp_path}/1.jpg"], [1], {1: "one"}, [True])
    assert table.query.all() and table.gallery.all() and table.source_names == ("toy",)
    assert table.labels.dtype == np.int64
