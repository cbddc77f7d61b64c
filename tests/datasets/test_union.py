import pytest

from unimetric.errors import UnimetricError
from unimetric.spec import create


@pytest.fixture
def roots(tmp_path, plant):
    plant(tmp_path, [f"{name}/{key}/{number}.jpg" for name in ("left", "right", "other/left") for key in "abcd" for number in range(2)])
    return tmp_path


def test_classes_of_the_same_name_stay_apart(roots):
    table = create("datasets", f"union(parts=[\"folder(root='{roots}/left')\", \"folder(root='{roots}/right', train=0.75)\"])")
    assert table.class_names == tuple(f"{name}/{key}" for name in ("left", "right") for key in "abcd")
    assert table.labels.tolist() == [row // 2 for row in range(16)]
    assert table.source.tolist() == [0] * 8 + [1] * 8 and table.source_names == ("left", "right")
    assert table.train.tolist() == [True] * 4 + [False] * 4 + [True] * 6 + [False] * 2


def test_a_union_in_a_union(roots):
    inner = f"union(parts=[\"folder(root='{roots}/left')\", \"folder(root='{roots}/right')\"])"
    outer = f"folder(root='{roots}/other/left', name='third')"
    table = create("datasets", f"union(parts=[{inner!r}, {outer!r}])")
    assert table.source_names == ("left", "right", "third")
    assert table.class_names == tuple(f"{name}/{key}" for name in ("left", "right", "third") for key in "abcd")


def test_a_dataset_twice(roots):
    with pytest.raises(UnimetricError, match="must be different, got left, left") as caught:
        create("datasets", f"union(parts=[\"folder(root='{roots}/left')\", \"folder(root='{roots}/other/left')\"])")
    assert "name='...'" in caught.value.hint


@pytest.mark.parametrize("parts", ["[]", "'cub200'", "[1]", "None"])
def test_parts_that_are_no_list_of_datasets(parts):
    with pytest.raises(UnimetricError, match="`parts` must be a list of") as caught:
        create("datasets", f"union(parts={parts})")
    assert "`parts`" in caught.value.hint


def test_misspelt_part():
    with pytest.raises(UnimetricError, match="no `cub20` in datasets") as caught:
        create("datasets", "union(parts=['cub20'])")
    assert caught.value.hint == "did you mean `cub200`?"
