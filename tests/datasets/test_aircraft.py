import pytest

from unimetric.errors import UnimetricError
from unimetric.spec import create

# Names have spaces and strokes; as the official list, sorted as text, so that 707-320 comes before A300B4.
VARIANTS = sorted(["707-320", "F-16A/B", "Gulfstream IV", *(f"A{number}B4" for number in range(97))])


@pytest.fixture
def root(tmp_path, plant):
    rows = {"train": [], "val": [], "test": []}
    for number, variant in enumerate(reversed(VARIANTS)):
        for offset, part in enumerate(rows):
            rows[part].append((f"{3 * number + offset:07}", variant))
    plant(tmp_path / "data" / "images", [f"{number}.jpg" for part in rows.values() for number, _ in part])
    for part, lines in rows.items():
        (tmp_path / "data" / f"images_variant_{part}.txt").write_text("".join(f"{number} {variant}\n" for number, variant in lines))
    return tmp_path


def test_layout_and_division(root):
    table = create("datasets", f"aircraft(root={str(root)!r})")
    assert table.class_names == tuple(VARIANTS)
    assert len(table) == 300 and (table.labels[:100] == range(99, -1, -1)).all()
    assert set(table.labels[table.train]) == set(range(50))
    assert set(table.labels[~table.train]) == set(range(50, 100))
    assert table.paths[0] == f"{root}/data/images/0000000.jpg"


def test_a_list_that_lacks(root):
    (root / "data" / "images_variant_val.txt").unlink()
    with pytest.raises(UnimetricError, match=r"images_variant_val.txt` does not exist"):
        create("datasets", f"aircraft(root={str(root)!r})")


def test_a_variant_that_lacks_would_move_the_division(root):
    for part in ("train", "val", "test"):
        file = root / "data" / f"images_variant_{part}.txt"
        file.write_text("\n".join(line for line in file.read_text().splitlines() if not line.endswith("Gulfstream IV")))
    with pytest.raises(UnimetricError, match="99 variants instead of 100"):
        create("datasets", f"aircraft(root={str(root)!r})")
