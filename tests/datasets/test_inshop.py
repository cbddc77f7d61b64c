import pytest

from unimetric.errors import UnimetricError
from unimetric.spec import bind, create

ROWS = [
    ("img/WOMEN/Dresses/id_00000002/02_1_front.jpg", "id_00000002", "train"),
    ("img/WOMEN/Dresses/id_00000002/02_2_side.jpg", "id_00000002", "train"),
    ("img/MEN/Denim/id_00000004/01_1_front.jpg", "id_00000004", "train"),
    ("img/WOMEN/Tees/id_00000001/01_1_front.jpg", "id_00000001", "query"),
    ("img/WOMEN/Tees/id_00000001/01_2_side.jpg", "id_00000001", "gallery"),
    ("img/WOMEN/Tees/id_00000007/01_1_front.jpg", "id_00000007", "query"),
    ("img/WOMEN/Tees/id_00000007/01_2_side.jpg", "id_00000007", "gallery"),
]


def write(folder, rows):
    lines = [f"{path:<70} {item} {part:<10}" for path, item, part in rows]
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "list_eval_partition.txt").write_text("\n".join([str(len(rows)), "image_name item_id evaluation_status", *lines]) + "\n")


def test_layout_division_and_roles(tmp_path, plant):
    write(tmp_path, ROWS)
    plant(tmp_path, [path for path, _, _ in ROWS])
    table = create("datasets", f"inshop(root={str(tmp_path)!r})")
    assert table.class_names == ("id_00000001", "id_00000002", "id_00000004", "id_00000007")
    assert table.labels.tolist() == [1, 1, 2, 0, 0, 3, 3]
    assert table.train.tolist() == [True] * 3 + [False] * 4
    assert table.query[3:].tolist() == [True, False, True, False]
    assert table.gallery[3:].tolist() == [False, True, False, True]
    assert table.query[:3].all() and table.gallery[:3].all()
    part, arguments = bind("splits", "standard")
    assert part(table, **arguments).test.tolist() == [3, 4, 5, 6]


def test_folders_of_the_download(tmp_path, plant):
    write(tmp_path / "Eval", ROWS)
    plant(tmp_path / "Img", [path for path, _, _ in ROWS])
    table = create("datasets", f"inshop(root={str(tmp_path)!r})")
    assert table.paths[0] == f"{tmp_path}/Img/{ROWS[0][0]}"


def test_unknown_part(tmp_path, plant):
    write(tmp_path, [*ROWS, ("img/MEN/Denim/id_00000009/01_1_front.jpg", "id_00000009", "qery")])
    plant(tmp_path, [path for path, _, _ in ROWS])
    with pytest.raises(UnimetricError, match="unknown part `qery`") as caught:
        create("datasets", f"inshop(root={str(tmp_path)!r})")
    assert caught.value.hint == "did you mean `query`?"
