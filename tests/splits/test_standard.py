import inspect
import re
from dataclasses import replace

import numpy as np
import pytest

from unimetric.errors import UnimetricError
from unimetric.images.table import Table
from unimetric.spec import bind, find, names


def table(counts=(3, 1, 2, 4, 5, 2, 3, 2), train=5):
    """Eight classes of some pictures each, of which the first five train; rows in no order."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    paths = tuple(f"{row}.jpg" for row in range(len(labels)))
    return Table(paths, labels, tuple("abcdefgh"[: len(counts)]), labels < train, source_names=("toy",))


def divide(data, text="standard"):
    part, arguments = bind("splits", text)
    return part(data, **arguments)


def classes(data, rows):
    return set(data.labels[rows].tolist())


@pytest.mark.parametrize("name", ["standard"])
def test_contract(name):
    assert name in names("splits")
    part = find("splits", name)
    documentation = inspect.getdoc(part)
    parameters = list(inspect.signature(part).parameters.values())
    assert [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY] == ["table"]
    for parameter in parameters:
        assert re.search(rf"^\s+{parameter.name}: \S", documentation.split("Args:")[1], re.MULTILINE), parameter.name
    assert re.search(r"\(.*(19|20)\d\d\)", documentation), "cites its source"


def test_training_and_test_rows():
    data = table()
    split = divide(data)
    assert split.train.tolist() == np.flatnonzero(data.train).tolist()
    assert split.test.tolist() == np.flatnonzero(~data.train).tolist()
    assert len(split.validation) == 0 and split.name == "standard"


@pytest.mark.parametrize(("share", "count"), [(0.01, 2), (0.4, 2), (0.6, 3)])
def test_validation_takes_whole_classes_out_of_training(share, count):
    data = table()
    split = divide(data, f"standard(validation={share})")
    assert len(classes(data, split.validation)) == count
    assert not classes(data, split.validation) & classes(data, split.train)
    assert 1 not in classes(data, split.validation)  # it has one picture: nothing could be found
    assert sorted([*split.train, *split.validation]) == np.flatnonzero(data.train).tolist()
    assert split.test.tolist() == divide(data).test.tolist()


def test_seed_decides():
    data = table((2,) * 8, train=6)
    drawn = {tuple(sorted(classes(data, divide(data, f"standard(validation=0.4, seed={seed})").validation))) for seed in range(30)}
    assert len(drawn) > 5
    again = [divide(data, "standard(validation=0.4, seed=3)").validation.tolist() for _ in range(2)]
    assert again[0] == again[1]


def test_a_run_offers_its_seed():
    assert bind("splits", "standard(validation=0.2)", seed=7)[1] == {"validation": 0.2, "seed": 7}


@pytest.mark.parametrize("share", [-0.1, 1, 1.5])
def test_share_outside_of_one(share):
    with pytest.raises(UnimetricError, match="`validation` must be at least 0 and below 1"):
        divide(table(), f"standard(validation={share})")


def test_too_many_validation_classes():
    with pytest.raises(UnimetricError, match=r"toy: 4 validation classes are too many for 5 training classes \(4 of them"):
        divide(table(), "standard(validation=0.8)")
    with pytest.raises(UnimetricError, match="3 validation classes are too many"):
        divide(table((1, 1, 1, 2, 2, 2, 2, 2)), "standard(validation=0.6)")


@pytest.mark.parametrize(
    ("train", "message"),
    [(0, "2 training classes, got 0"), (1, "2 training classes, got 1"), (8, "2 test classes, got 0"), (7, "2 test classes, got 1")],
)
def test_parts_that_are_too_small(train, message):
    with pytest.raises(UnimetricError, match=f"toy: a split needs at least {message}") as caught:
        divide(table((2,) * 8, train=train))
    assert "train=0.5" in caught.value.hint


def test_hint_for_fewer_than_four_classes():
    with pytest.raises(UnimetricError, match="2 training classes, got 1") as caught:
        divide(table((2,) * 3, train=1))
    assert "train=" not in caught.value.hint and "four" in caught.value.hint


def test_class_in_both_parts():
    data = table()
    mixed = data.train.copy()
    mixed[np.flatnonzero(data.labels == 4)[0]] = False
    with pytest.raises(UnimetricError, match="1 of 8 classes are in both training and test, the first is `e`") as caught:
        divide(replace(data, train=mixed))
    assert "known_classes=True" in caught.value.hint


def test_known_classes_on_request(caplog):
    labels = np.repeat(np.arange(8), 4)
    data = Table(tuple(f"{row}.jpg" for row in range(32)), labels, tuple("abcdefgh"), labels < 4)
    mixed = np.arange(len(data)) % 2 == 0  # half of the images of every class
    split = divide(replace(data, train=mixed), "standard(known_classes=True)")
    assert "8 of 8 classes are in both training and test" in caplog.text and "do not predict" in caplog.text
    assert set(data.labels[split.train]) == set(data.labels[split.test]) == set(range(8))


def test_lone_test_class():
    with pytest.raises(UnimetricError, match=r"toy: .* but 1 of 5 test images have none, the first of class `g`"):
        divide(table((2, 2, 2, 2, 2, 2, 1, 2)))


def test_query_needs_another_picture_in_the_gallery():
    data = table((2,) * 8)
    first = np.array([data.labels[:row].tolist().count(label) == 0 for row, label in enumerate(data.labels)])
    assert len(divide(replace(data, query=first, gallery=~first)).test) == 6
    # Both of class f ask and one of them answers: that one would have to find itself.
    query = first | (data.labels == 5)
    with pytest.raises(UnimetricError, match=r"1 of 6 test images have none, the first of class `f`"):
        divide(replace(data, query=query, gallery=~first))
    # A class that only answers may be alone.
    lone = table((2, 2, 2, 2, 2, 2, 1, 2))
    assert len(divide(replace(lone, query=lone.labels != 6)).test) == 5


@pytest.mark.parametrize("role", ["query", "gallery"])
def test_nobody_asks_or_answers(role):
    data = table((2,) * 8)
    with pytest.raises(UnimetricError, match=f"at least one test image must be a {role}"):
        divide(replace(data, **{role: data.train}))
