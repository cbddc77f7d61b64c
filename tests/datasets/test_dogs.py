import numpy as np
import pytest
from scipy.io import savemat

from unimetric.errors import UnimetricError
from unimetric.spec import create

BREEDS = [f"n020{number:05}-breed_{number}" for number in range(1, 121)]


@pytest.fixture
def files():
    return [f"{breed}/{breed[:10]}_{number}.jpg" for breed in BREEDS for number in (10074, 9)]


def save(path, files, labels):
    """A column of cells of strings, and a column of numbers."""
    path.parent.mkdir(exist_ok=True)
    cells = np.empty((len(files), 1), object)
    cells[:, 0] = files
    savemat(path, {"file_list": cells, "annotation_list": cells, "labels": np.array(labels, np.uint8)[:, None]})


@pytest.mark.parametrize("place", ["file_list.mat", "lists/file_list.mat"])
def test_list_and_division(tmp_path, plant, files, place):
    plant(tmp_path / "Images", files)
    save(tmp_path / place, files, [1 + number // 2 for number in range(240)])
    table = create("datasets", f"dogs(root={str(tmp_path)!r})")
    assert table.class_names == tuple(BREEDS)
    assert table.labels.tolist() == [number // 2 for number in range(240)]
    assert table.train.tolist() == [True] * 120 + [False] * 120
    assert table.paths[0] == f"{tmp_path}/Images/{files[0]}"


def test_folders_give_the_same_division(tmp_path, plant, files):
    plant(tmp_path / "Images", files)
    without = create("datasets", f"dogs(root={str(tmp_path)!r})")
    save(tmp_path / "file_list.mat", files, [1 + number // 2 for number in range(240)])
    table = create("datasets", f"dogs(root={str(tmp_path)!r})")
    assert table.class_names == without.class_names
    assert dict(zip(table.paths, table.labels, strict=True)) == dict(zip(without.paths, without.labels, strict=True))
    assert dict(zip(table.paths, table.train, strict=True)) == dict(zip(without.paths, without.train, strict=True))


def test_a_breed_that_lacks_would_move_the_division(tmp_path, plant, files):
    plant(tmp_path / "Images", files[2:])
    with pytest.raises(UnimetricError, match="119 breeds instead of 120"):
        create("datasets", f"dogs(root={str(tmp_path)!r})")


def test_list_of_unequal_columns(tmp_path, plant, files):
    plant(tmp_path / "Images", files)
    save(tmp_path / "file_list.mat", files, [1, 2])
    with pytest.raises(UnimetricError, match="240 images and 2 labels"):
        create("datasets", f"dogs(root={str(tmp_path)!r})")
