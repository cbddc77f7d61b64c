import pytest

from unimetric.errors import UnimetricError
from unimetric.spec import create

CLASSES = {1: "001.Black_footed_Albatross", 100: "100.Brown_Pelican", 101: "101.White_Pelican", 200: "200.Common_Yellowthroat"}


@pytest.fixture
def root(tmp_path, plant):
    rows = [(key, f"{name}/{name[4:]}_{number}.jpg") for key, name in CLASSES.items() for number in range(2)]
    plant(tmp_path / "images", [path for _, path in rows])
    (tmp_path / "classes.txt").write_text("".join(f"{key} {name}\n" for key, name in CLASSES.items()))
    (tmp_path / "images.txt").write_text("".join(f"{number} {path}\n" for number, (_, path) in enumerate(rows, 1)))
    (tmp_path / "image_class_labels.txt").write_text("".join(f"{number} {key}\n" for number, (key, _) in enumerate(rows, 1)))
    return tmp_path


def test_layout_and_division(root):
    table = create("datasets", f"cub200(root={str(root)!r})")
    assert table.class_names == tuple(CLASSES.values())
    assert table.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert table.train.tolist() == [True] * 4 + [False] * 4
    assert table.paths[0] == f"{root}/images/001.Black_footed_Albatross/Black_footed_Albatross_0.jpg"


def test_picture_without_a_class(root):
    (root / "images.txt").open("a").write("9 1/nine.jpg\n")
    with pytest.raises(UnimetricError, match=r"no class for image 9, `1/nine.jpg`"):
        create("datasets", f"cub200(root={str(root)!r})")


@pytest.mark.parametrize("name", ["classes.txt", "images.txt", "image_class_labels.txt"])
def test_missing_annotation(root, name):
    (root / name).unlink()
    with pytest.raises(UnimetricError, match=f"{name}` does not exist"):
        create("datasets", f"cub200(root={str(root)!r})")


def test_missing_picture(root):
    (root / "images" / CLASSES[1] / "Black_footed_Albatross_0.jpg").unlink()
    with pytest.raises(UnimetricError, match="cub200: 1 of 8 listed images are missing"):
        create("datasets", f"cub200(root={str(root)!r})")
    assert len(create("datasets", f"cub200(root={str(root)!r}, on_missing='skip')")) == 7
