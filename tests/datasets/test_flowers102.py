import numpy as np
import pytest
from scipy.io import savemat

from unimetric.errors import UnimetricError
from unimetric.spec import create


@pytest.fixture
def root(tmp_path, plant):
    savemat(tmp_path / "imagelabels.mat", {"labels": np.array([[77, 77, 51, 1, 52, 102, 1]], np.uint8)})
    plant(tmp_path / "jpg", [f"image_{number:05}.jpg" for number in range(1, 8)])
    return tmp_path


def test_layout_and_division(root):
    table = create("datasets", f"flowers102(root={str(root)!r})")
    assert table.class_names == ("1", "51", "52", "77", "102")
    assert [table.class_names[label] for label in table.labels] == ["77", "77", "51", "1", "52", "102", "1"]
    assert table.train.tolist() == [False, False, True, True, False, False, True]
    assert table.paths[-1] == f"{root}/jpg/image_00007.jpg"


def test_missing_picture(root):
    (root / "jpg" / "image_00003.jpg").unlink()
    with pytest.raises(UnimetricError, match=r"image_00003.jpg"):
        create("datasets", f"flowers102(root={str(root)!r})")
