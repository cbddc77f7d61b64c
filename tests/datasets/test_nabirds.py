import pytest

from unimetric.errors import UnimetricError
from unimetric.spec import create

LEAVES = list(range(295, 295 + 2 * 555, 2))  # ids have gaps: inner nodes of the tree lie between


@pytest.fixture
def root(tmp_path, plant):
    rows = [(f"{key:08}-21dc-4d0c-bfe1-{number}", f"{key:04}/{key}_{number}.jpg", key) for key in reversed(LEAVES) for number in range(2)]
    plant(tmp_path / "images", [path for _, path, _ in rows])
    (tmp_path / "images.txt").write_text("".join(f"{picture} {path}\n" for picture, path, _ in rows))
    (tmp_path / "image_class_labels.txt").write_text("".join(f"{picture} {key}\n" for picture, _, key in rows))
    (tmp_path / "classes.txt").write_text("".join(f"{key} Oak Titmouse (Adult)\n" for key in range(1500)))
    return tmp_path


def test_layout_and_division(root):
    table = create("datasets", f"nabirds(root={str(root)!r})")
    assert len(table.class_names) == 555 and table.class_names[0] == "0295.Oak Titmouse (Adult)"
    assert table.labels[0] == 554 and table.labels[-1] == 0  # by id, which is not the order of the pictures
    assert set(table.labels[table.train]) == set(range(278))
    assert set(table.labels[~table.train]) == set(range(278, 555))
    assert table.paths[0] == f"{root}/images/{LEAVES[-1]:04}/{LEAVES[-1]}_0.jpg"


def test_a_class_that_lacks_would_move_the_division(root):
    lines = (root / "image_class_labels.txt").read_text().splitlines()
    (root / "image_class_labels.txt").write_text("\n".join(lines[2:]))
    with pytest.raises(UnimetricError, match="554 classes instead of 555"):
        create("datasets", f"nabirds(root={str(root)!r})")


def test_class_without_a_name(root):
    (root / "classes.txt").write_text("295 Oak Titmouse\n")
    with pytest.raises(UnimetricError, match="which has no name"):
        create("datasets", f"nabirds(root={str(root)!r})")
