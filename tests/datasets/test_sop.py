import pytest

from unimetric.errors import UnimetricError
from unimetric.spec import create

HEADER = "image_id class_id super_class_id path\n"


@pytest.fixture
def root(tmp_path, plant):
    train = ["1 1 1 bicycle_final/111_0.JPG", "2 1 1 bicycle_final/111_1.JPG", "3 2 12 toaster_final/222_0.JPG"]
    test = ["59552 11319 1 bicycle_final/333_0.JPG", "59553 11319 1 bicycle_final/333_1.JPG"]
    plant(tmp_path, [line.split()[-1] for line in train + test])
    (tmp_path / "Ebay_train.txt").write_text(HEADER + "\n".join(train) + "\n")
    (tmp_path / "Ebay_test.txt").write_text(HEADER + "\n".join(test) + "\n")
    return tmp_path


def test_layout_and_division(root):
    table = create("datasets", f"sop(root={str(root)!r})")
    assert table.class_names == ("bicycle/1", "toaster/2", "bicycle/11319")
    assert table.labels.tolist() == [0, 0, 1, 2, 2]
    assert table.train.tolist() == [True, True, True, False, False]
    assert table.paths[-1] == f"{root}/bicycle_final/333_1.JPG"


def test_malformed_line(root):
    (root / "Ebay_test.txt").open("a").write("59554 11320 bicycle_final/444_0.JPG\n")
    with pytest.raises(UnimetricError, match=r"Ebay_test.txt`, line 4: cannot read"):
        create("datasets", f"sop(root={str(root)!r})")
