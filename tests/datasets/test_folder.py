import pytest

from unimetric.cli.data import pack
from unimetric.errors import UnimetricError
from unimetric.spec import bind, create


def read(root, extra=""):
    return create("datasets", f"folder(root={str(root)!r}{', ' if extra else ''}{extra})")


def trained(table):
    return sorted({table.class_names[label] for label in table.labels[table.train]})


@pytest.fixture
def shoes(tmp_path, plant):
    root = tmp_path / "shoes"
    plant(root, [f"{name}/{number}.png" for name in ("clog", "boot", "mule", "sandal", "pump") for number in (2, 10)])
    return root


def test_first_half_of_the_sorted_classes_trains(shoes, plant):
    plant(shoes, ["overview.jpg"])  # lies in no class
    (shoes / "boot" / "notes.txt").write_text("no picture")
    table = read(shoes)
    assert table.class_names == ("boot", "clog", "mule", "pump", "sandal")
    assert table.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert trained(table) == ["boot", "clog", "mule"]
    assert table.paths[0] == f"{shoes}/boot/10.png"
    assert table.source_names == ("shoes",)


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.2, 1), (0.21, 2), (0.6, 3), (1.0, 5)])
def test_share_of_the_classes(shoes, share, count):
    assert len(trained(read(shoes, f"train={share}"))) == count


def test_share_outside_of_one(shoes):
    with pytest.raises(UnimetricError, match=r"`train` must be from 0 to 1 or a string or None, got 1.5"):
        read(shoes, "train=1.5")


@pytest.mark.parametrize("text", ["folder(root={root!r})", "files(root={root!r}, labels=True)", "csv(file='{root}/a.csv')"])
def test_classes_of_one_text_in_other_characters(tmp_path, plant, text):
    names = [f"caf{letter}/{number}.png" for letter in ("\xe9", "e\u0301") for number in range(2)]
    plant(tmp_path, names)
    (tmp_path / "a.csv").write_text("".join(["path,label\n", *(f"{name},{name[:-6]}\n" for name in names)]), encoding="utf-8")
    with pytest.raises(UnimetricError, match=r"the classes 'cafe\\u0301' and 'caf\\xe9' are the same text"):
        create("datasets", text.format(root=str(tmp_path)))


def test_classes_from_a_file(shoes):
    (shoes / "seen.txt").write_text("sandal\nboot\n")
    assert trained(read(shoes, "train='seen.txt'")) == ["boot", "sandal"]
    (shoes / "seen.txt").write_text("\ufeffboot\r\nsandal\r\n", encoding="utf-8")  # as Windows writes it
    assert trained(read(shoes, "train='seen.txt'")) == ["boot", "sandal"]
    (shoes / "seen.txt").write_text("sandel\n")
    with pytest.raises(UnimetricError, match="unknown class `sandel`") as caught:
        read(shoes, "train='seen.txt'")
    assert caught.value.hint == "did you mean `sandal`?"
    with pytest.raises(UnimetricError, match=r"lost\.txt") as caught:
        read(shoes, "train='lost.txt'")
    assert "one training class per line" in caught.value.hint


def test_parts_are_what_they_are_called(tmp_path, plant, caplog):
    plant(tmp_path, [f"train/{name}/{number}.jpg" for name in ("x", "z") for number in range(2)])
    plant(tmp_path, [f"test/{name}/{number}.jpg" for name in ("w", "y") for number in range(2)])
    table = read(tmp_path)
    assert table.class_names == ("w", "x", "y", "z") and trained(table) == ["x", "z"]
    assert trained(read(tmp_path, "train=0.5")) == ["w", "x"]  # of both parts together
    plant(tmp_path, ["val/v/1.jpg", "val/v/2.jpg"])
    assert read(tmp_path).class_names == ("w", "x", "y", "z") and "val` is skipped" in caplog.text
    assert read(tmp_path, "train=0.5").class_names == ("v", "w", "x", "y", "z")


def test_validation_part_tests_where_there_is_no_test_part(tmp_path, plant):
    plant(tmp_path, [f"{part}/{name}/{n}.jpg" for part, names in (("train", "ab"), ("val", "cd")) for name in names for n in range(2)])
    assert trained(read(tmp_path)) == ["a", "b"]


def test_training_part_alone(tmp_path, plant):
    plant(tmp_path, ["train/a/1.jpg", "train/b/1.jpg"])
    with pytest.raises(UnimetricError, match="no part `test`"):
        read(tmp_path)


def test_same_classes_in_both_parts_are_refused_by_the_split(tmp_path, plant):
    plant(tmp_path, [f"{part}/{name}/{part}{number}.jpg" for part in ("train", "test") for name in "abcd" for number in range(2)])
    split, arguments = bind("splits", "standard")
    with pytest.raises(UnimetricError, match="4 of 4 classes are in both training and test, the first is `a`") as caught:
        split(read(tmp_path), **arguments)
    assert "train=0.5" in caught.value.hint
    assert len(split(read(tmp_path, "train=0.5"), **arguments).train) == 8


def test_pack_warns_about_classes_in_both_parts(tmp_path, plant, caplog):
    plant(tmp_path, [f"{part}/{name}/{number}.jpg" for part in ("train", "test") for name in "abcd" for number in range(2)])
    pack(f"folder(root={str(tmp_path)!r}, train=0.5)", out=tmp_path / "half.pack")
    assert not caplog.text
    pack(f"folder(root={str(tmp_path)!r})", out=tmp_path / "both.pack")
    assert "4 of 4 classes are in both training and test" in caplog.text and "`train=0.5`" in caplog.text


def test_a_class_may_be_called_train(tmp_path, plant):
    plant(tmp_path, [f"{name}/{number}.jpg" for name in ("train", "tram", "bus") for number in range(2)])
    assert read(tmp_path).class_names == ("bus", "train", "tram")


def test_class_of_one_picture(shoes, caplog):
    (shoes / "clog" / "2.png").unlink()
    with pytest.raises(UnimetricError, match="shoes: 1 of 5 classes have only one image, the first is `clog`") as caught:
        read(shoes)
    assert "on_single='skip'" in caught.value.hint
    table = read(shoes, "on_single='skip'")
    assert len(table) == 8 and "the first is `clog`; they are skipped" in caplog.text


def test_classes_of_one_picture_are_skipped_before_the_split(tmp_path, plant):
    lone = ("wagon1", "wagon2", "wagon3")
    plant(tmp_path, [f"{name}/1.jpg" for name in ("bus", "car", "tram", "van", *lone)])
    plant(tmp_path, [f"{name}/2.jpg" for name in ("bus", "car", "tram", "van")])
    table = read(tmp_path, "on_single='skip'")
    train, test = ({table.class_names[label] for label in table.labels[rows]} for rows in (table.train, ~table.train))
    assert (train, test) == ({"bus", "car"}, {"tram", "van"})


def test_class_is_the_folder_that_holds_the_images(tmp_path, plant):
    with pytest.raises(UnimetricError, match="has no images in subfolders"):
        read(tmp_path)
    folders = ("kitchen", "kitchen/cups/red", "kitchen/cups/blue", "bath/towels")
    plant(tmp_path, [f"{folder}/{number}.jpg" for folder in folders for number in range(2)])
    table = read(tmp_path)
    assert table.class_names == ("bath/towels", "kitchen", "kitchen/cups/blue", "kitchen/cups/red")
    assert table.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert trained(table) == ["bath/towels", "kitchen"]
    (tmp_path / "seen.txt").write_text("kitchen/cups/red\nkitchen\n")
    assert trained(read(tmp_path, "train='seen.txt'")) == ["kitchen", "kitchen/cups/red"]


def test_nested_classes_within_parts(tmp_path, plant):
    plant(tmp_path, [f"{part}/{name}/{n}.jpg" for part, name in (("train", "cups/red"), ("test", "bowls/deep")) for n in range(2)])
    table = read(tmp_path)
    assert table.class_names == ("bowls/deep", "cups/red") and trained(table) == ["cups/red"]


@pytest.mark.parametrize(
    ("layout", "hint"), [("shop/{part}/{name}", "shop')`"), ("{name}/{part}", "move them to the top"), ("shop/{name}/{part}", "move them")]
)
def test_parts_that_are_not_outermost_are_no_classes(tmp_path, plant, layout, hint):
    plant(tmp_path, [f"{layout.format(part=part, name=name)}/{n}.jpg" for part in ("train", "test") for name in "abcd" for n in range(2)])
    with pytest.raises(UnimetricError, match="must be the outermost folders") as caught:
        read(tmp_path)
    assert hint in caught.value.hint


@pytest.mark.parametrize("extra", ["", "train=0.5"])
def test_parts_in_upper_case_are_no_classes(tmp_path, plant, extra):
    plant(tmp_path / "parts", [f"{part}/{name}/{n}.jpg" for part in ("Train", "Test") for name in "ab" for n in range(2)])
    with pytest.raises(UnimetricError, match="must be in lower case, got Test, Train") as caught:
        read(tmp_path / "parts", extra)
    assert caught.value.hint == "rename them to test, train"
    plant(tmp_path / "classes", [f"{name}/{n}.jpg" for name in ("Train", "Test") for n in range(2)])
    assert read(tmp_path / "classes", extra).class_names == ("Test", "Train")


@pytest.mark.parametrize("extra", ["train/cover.jpg", "test/overview.jpg", "drawings/x/0.jpg", "drawings/0.jpg"])
@pytest.mark.parametrize("train", ["", "train=0.5"])
def test_images_outside_of_the_parts_are_an_error(tmp_path, plant, extra, train):
    plant(tmp_path, [f"{part}/{name}/{number}.jpg" for part in ("train", "test") for name in ("x", "y") for number in range(2)])
    plant(tmp_path, [extra])
    with pytest.raises(UnimetricError, match=f"next to the parts test, train, .* but 1 are not, the first is `{extra}`"):
        read(tmp_path, f"on_single='skip'{', ' * bool(train)}{train}")


def test_part_without_class_folders_is_an_error(tmp_path, plant):
    plant(tmp_path, [f"test/{name}/{number}.jpg" for name in ("x", "y") for number in range(2)])
    plant(tmp_path, ["train/0.jpg", "train/1.jpg"])
    with pytest.raises(UnimetricError, match="2 are not, the first is `train/0"):
        read(tmp_path)


def test_root_is_needed():
    with pytest.raises(UnimetricError, match="needs `root`"):
        create("datasets", "folder")
