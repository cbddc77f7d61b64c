"""Datasets of re-identification: identity and camera in file names, and the table of wildlife-datasets."""

from __future__ import annotations

import pytest

from unimetric.errors import UnimetricError
from unimetric.geometry.space import Space
from unimetric.spec import create
from unimetric.splits.standard import standard

MARKET = {
    "bounding_box_train": ["0002_c1s1_000451_03.jpg", "0002_c2s1_000451_03.jpg", "0007_c1s1_1_01.jpg", "0007_c3s1_1_01.jpg"],
    "query": ["0001_c1s1_1_00.jpg", "0003_c2s1_1_00.jpg"],
    "bounding_box_test": [
        *("-1_c1s1_1_00.jpg", "0000_c1s1_1_00.jpg", "0000_c2s1_1_00.jpg"),
        *("0001_c1s1_2_00.jpg", "0001_c2s1_2_00.jpg", "0003_c3s1_2_00.jpg"),
    ],
}


def test_camera_names(tmp_path, plant):
    plant(tmp_path, [f"{folder}/{name}" for folder, names in MARKET.items() for name in names])
    table = create("datasets", f"camera_names(root='{tmp_path}', name='market')")
    assert table.class_names == ("0", "1", "2", "3", "7") and table.source_names == ("market",)
    assert len(table) == 11 and table.group_names == ("camera 1", "camera 2", "camera 3")
    assert table.train.sum() == 4 and table.query[table.train].all() and table.gallery[table.train].all()
    test = table.take(~table.train)
    assert [int(table.class_names[label]) for label in test.labels[test.query]] == [1, 3]
    assert (test.query ^ test.gallery).all() and test.gallery.sum() == 5
    assert len(standard(table).test) == 7
    # The image of identity 1 from camera 1 is left out for the query from camera 1.
    space = Space([[1.0, 0.1 * row] for row in range(7)], test.labels, test.query, test.gallery, group=test.group)
    assert space.relevant.tolist() == [1, 1]


def test_camera_names_of_vehicles(tmp_path, plant):
    names = (
        "image_train/0001_c001_1_0.jpg",
        "image_train/0004_c002_1_0.jpg",
        "image_query/0002_c002_1_0.jpg",
        "image_test/0002_c003_1_0.jpg",
    )
    plant(tmp_path, names)
    assert create("datasets", f"camera_names(root='{tmp_path}')").group_names == ("camera 001", "camera 002", "camera 003")


def test_camera_names_rejects_other_folders(tmp_path, plant):
    plant(tmp_path, [f"bounding_box_train/{name}" for name in MARKET["bounding_box_train"]])
    with pytest.raises(UnimetricError, match="no folder of query images"):
        create("datasets", f"camera_names(root='{tmp_path}')")
    plant(tmp_path, ["query/photo.jpg", "gallery/0001_c1.jpg"])
    with pytest.raises(UnimetricError, match=r"photo.jpg.*identity and camera"):
        create("datasets", f"camera_names(root='{tmp_path}')")
    with pytest.raises(UnimetricError, match="two groups"):
        create("datasets", f"camera_names(root='{tmp_path}', pattern='x')")
    with pytest.raises(UnimetricError, match="regular expression"):
        create("datasets", f"camera_names(root='{tmp_path}', pattern='(')")


LINES = """image_id,identity,path,bbox,date,orientation
1,leo,a/1.jpg,"[0, 0, 5, 5]",2019-06-30 08:00:00,left
2,leo,a/2.jpg,"[0, 0, 5, 5]",2019-06-30 09:30:00,right
3,leo,a/3.jpg,"[0, 0, 5, 5]",2019-07-02,left
4,nala,a/4.jpg,,2019-06-30,left
5,nala,a/5.jpg,,,left
6,unknown,a/6.jpg,,2019-06-30,left
7,sarabi,a/7.jpg,,2019-06-30,left
8,zira,a/8.jpg,,2019-06-30,left
9,zira,a/9.jpg,,2019-07-30,left
"""


def test_wildlife(tmp_path, plant):
    plant(tmp_path, [f"a/{number}.jpg" for number in range(1, 10)])
    (tmp_path / "metadata.csv").write_text(LINES)
    table = create("datasets", f"wildlife(root='{tmp_path}', name='lions')")
    assert table.class_names == ("leo", "nala", "sarabi", "zira") and table.source_names == ("lions",)
    assert [table.class_names[label] for label in table.labels] == ["leo"] * 3 + ["nala"] * 2 + ["zira"] * 2  # sarabi is alone
    assert table.train.tolist() == [True] * 5 + [False] * 2
    assert table.group_names == ("2019-06-30", "2019-07-02", "2019-07-30") and table.group.tolist() == [0, 0, 1, 0, -1, 0, 2]
    assert table.paths[0] == f"{tmp_path}/a/1.jpg#xywh=0,0,5,5" and table.paths[3] == f"{tmp_path}/a/4.jpg"
    assert create("datasets", f"wildlife(root='{tmp_path}', group='orientation')").group_names == ("left", "right")
    assert create("datasets", f"wildlife(root='{tmp_path}', train=0.25)").train.sum() == 3
    with pytest.raises(UnimetricError, match="only one image, the first is `sarabi`"):
        create("datasets", f"wildlife(root='{tmp_path}', on_single='error')")
    (tmp_path / "metadata.csv").write_text(LINES.replace("identity,", "name,", 1))
    with pytest.raises(UnimetricError, match="no column `identity`"):
        create("datasets", f"wildlife(root='{tmp_path}')")
    (tmp_path / "metadata.csv").write_text(LINES.replace("zira,a/9", ",a/9"))
    with pytest.raises(UnimetricError, match="line 10: identity and path"):
        create("datasets", f"wildlife(root='{tmp_path}')")
    for path in ("a/9.jpg", "./a//9.jpg", tmp_path / "a/9.jpg"):
        (tmp_path / "metadata.csv").write_text(LINES + f"10,zira,{path},,2019-08-30,left\n")
        with pytest.raises(UnimetricError, match=r"line 11: `.*/a/9\.jpg` is listed in line 10 already"):
            create("datasets", f"wildlife(root='{tmp_path}')")
