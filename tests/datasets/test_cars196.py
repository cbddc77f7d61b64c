import numpy as np
import pytest
from scipy.io import savemat

from unimetric.errors import UnimetricError
from unimetric.spec import create

NAMES = np.array([f"Make Model {year}" for year in range(1, 197)], object)


def structs(rows):
    """A 1 x N struct array, as MATLAB saves it: every field of every row is an array of its own."""
    array = np.empty((1, len(rows)), [(key, object) for key in rows[0]])
    for number, row in enumerate(rows):
        array[0, number] = tuple(row.values())
    return array


@pytest.fixture
def root(tmp_path, plant):
    """The later layout: names start from 00001.jpg in both parts, and both hold pictures of all classes."""
    plant(tmp_path, [f"{part}/{number:05}.jpg" for part in ("cars_train", "cars_test") for number in (1, 2, 3, 4)])
    (tmp_path / "devkit").mkdir()
    savemat(tmp_path / "devkit" / "cars_meta.mat", {"class_names": NAMES[None]})
    for file, classes in (("devkit/cars_train_annos.mat", (1, 98, 99, 196)), ("cars_test_annos_withlabels.mat", (196, 99, 98, 1))):
        rows = [{"bbox_x1": 1, "class": np.uint8(key), "fname": f"{number:05}.jpg"} for number, key in enumerate(classes, 1)]
        savemat(tmp_path / file, {"annotations": structs(rows)})
    return tmp_path


def test_parts_with_devkit(root):
    table = create("datasets", f"cars196(root={str(root)!r})")
    assert len(table.class_names) == 196 and table.class_names[97] == "Make Model 98"
    assert table.labels.tolist() == [0, 97, 98, 195, 195, 98, 97, 0]
    assert table.train.tolist() == [True, True, False, False, False, False, True, True]
    assert table.paths[0] == f"{root}/cars_train/00001.jpg" and table.paths[4] == f"{root}/cars_test/00001.jpg"


def test_older_layout_gives_the_same_classes(root, tmp_path_factory, plant):
    older = tmp_path_factory.mktemp("older")
    classes = (1, 98, 99, 196, 196, 99, 98, 1)
    plant(older, [f"car_ims/{number:06}.jpg" for number in range(1, 9)])
    rows = [
        {"relative_im_path": f"car_ims/{number:06}.jpg", "bbox_x1": 1, "class": np.uint8(key), "test": np.uint8(number > 4)}
        for number, key in enumerate(classes, 1)
    ]
    savemat(older / "cars_annos.mat", {"annotations": structs(rows), "class_names": NAMES[None]})
    table, other = (create("datasets", f"cars196(root={str(folder)!r})") for folder in (older, root))
    assert table.class_names == other.class_names
    assert table.labels.tolist() == other.labels.tolist() and table.train.tolist() == other.train.tolist()
    assert table.paths[0] == f"{older}/car_ims/000001.jpg"


def test_absent_pictures(root):
    (root / "cars_test" / "00003.jpg").unlink()
    with pytest.raises(UnimetricError, match=r"cars196: 1 of 8 listed images are missing, the first is `.*cars_test/00003.jpg`"):
        create("datasets", f"cars196(root={str(root)!r})")
    assert len(create("datasets", f"cars196(root={str(root)!r}, on_missing='skip')")) == 7


def test_test_annotations_without_labels(root):
    savemat(root / "cars_test_annos_withlabels.mat", {"annotations": structs([{"bbox_x1": 1, "fname": "00001.jpg"}])})
    with pytest.raises(UnimetricError, match="has no `class`") as caught:
        create("datasets", f"cars196(root={str(root)!r})")
    assert "_withlabels.mat" in caught.value.hint
    (root / "cars_test_annos_withlabels.mat").unlink()
    with pytest.raises(UnimetricError, match=r"cars_test_annos_withlabels.mat` does not exist"):
        create("datasets", f"cars196(root={str(root)!r})")
