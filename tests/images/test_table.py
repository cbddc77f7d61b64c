import numpy as np
import pytest

from unimetric.errors import UnimetricError
from unimetric.images.table import Split, Table, union


def table(name="toy", labels=(0, 0, 1, 1, 2), classes="abc", **more):
    labels = np.asarray(labels)
    paths = tuple(f"{name}/{row}.jpg" for row in range(len(labels)))
    return Table(paths, labels, tuple(classes), labels < 1, source_names=(name,), **more)


def test_defaults():
    data = table()
    assert len(data) == 5
    assert data.query.all() and data.gallery.all() and not data.source.any()
    assert [getattr(data, name).dtype for name in ("labels", "train", "query", "source")] == [np.int64, bool, bool, np.int64]


def test_lists_become_arrays_and_empty_is_allowed():
    assert Table(("a.jpg",), [0], ("a",), [True]).labels.tolist() == [0]
    assert len(Table((), [], (), [])) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": [0, 1]}, r"Table.labels. must have one value per path \(3\), got 2"),
        ({"train": [True]}, "train.*got 1"),
        ({"query": [True]}, "query.*got 1"),
        ({"labels": [0, 1, 2]}, "indices into class_names"),
        ({"labels": [0, -1, 1]}, "indices into class_names"),
        ({"class_names": ("a", "a")}, "must be unique"),
        ({"source": [0, 1, 0]}, "indices into source_names"),
    ],
)
def test_a_table_that_does_not_fit(arguments, message):
    good = {"paths": ("a", "b", "c"), "labels": [0, 1, 1], "class_names": ("a", "b"), "train": [True, False, False]}
    assert len(Table(**good)) == 3
    with pytest.raises(ValueError, match=message):
        Table(**(good | arguments))


def test_take_by_number_and_by_mask():
    data = table(query=[True, False, True, False, True])
    some = data.take(np.array([4, 0]))
    assert some.paths == ("toy/4.jpg", "toy/0.jpg") and some.labels.tolist() == [2, 0] and some.train.tolist() == [False, True]
    assert some.class_names == data.class_names
    assert data.take(data.query).paths == data.take([0, 2, 4]).paths == ("toy/0.jpg", "toy/2.jpg", "toy/4.jpg")
    assert len(data.take([])) == 0 and data.take([]).class_names == data.class_names


def test_union_keeps_every_row_and_no_id_collides():
    tables = [table("one", query=[True, False, True, True, True]), table("two", (1, 0, 0), "ab"), table("three")]
    data = union(tables)
    assert data.paths == sum((part.paths for part in tables), ())
    assert data.source_names == ("one", "two", "three") and data.source.tolist() == [0] * 5 + [1] * 3 + [2] * 5
    for name in ("train", "query", "gallery"):
        assert getattr(data, name).tolist() == [value for part in tables for value in getattr(part, name)]
    expected = [f"{part.source_names[0]}/{part.class_names[label]}" for part in tables for label in part.labels]
    assert [data.class_names[label] for label in data.labels] == expected
    assert len(set(data.class_names)) == 8


def test_union_of_unions_is_the_union():
    tables = [table("one"), table("two"), table("three")]
    left, flat = union([union(tables[:2]), tables[2]]), union(tables)
    assert left.class_names == flat.class_names and left.source_names == flat.source_names
    assert left.labels.tolist() == flat.labels.tolist() and left.source.tolist() == flat.source.tolist()


def test_union_of_nothing_or_of_the_same():
    with pytest.raises(UnimetricError, match="union needs at least 1 dataset"):
        union([])
    with pytest.raises(UnimetricError, match="must be different, got one, one"):
        union([table("one"), table("one")])


def test_split_holds_row_numbers():
    split = Split([0, 1], [], [2])
    assert [part.dtype for part in (split.train, split.validation, split.test)] == [np.int64] * 3
    assert len(split.validation) == 0


def test_groups_are_taken_and_united_without_collision():
    one = table("one", group=[0, 1, -1, 0, 1], group_names=("c1", "c2"), group_rule="group")
    both = union([table("none"), one, table("two", group=[0] * 5, group_names=("c1",), group_rule="group")])
    assert both.group.tolist() == [-1] * 5 + [0, 1, -1, 0, 1] + [2] * 5 and both.group_names == ("c1", "c2", "c1")
    assert both.group_rule == "group" and one.take([4, 0]).group.tolist() == [1, 0]
    assert table().group.tolist() == [-1] * 5
    with pytest.raises(UnimetricError, match="same group rule"):
        union([one, table("two", group=[0] * 5, group_names=("c1",))])
    with pytest.raises(ValueError, match="indices into group_names"):
        table(group=[0] * 5)
