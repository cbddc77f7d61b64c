import inspect
import json
import re

import numpy as np
import pytest

from unimetric.errors import UnimetricError
from unimetric.images.table import Table
from unimetric.spec import bind, find
from unimetric.splits.ood import distances

NAMES = tuple("abcdefgh")


def table():
    """Eight classes of four pictures in no order; the first four train."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(8), 4))
    return Table(tuple(f"{row}.jpg" for row in range(32)), labels, NAMES, labels < 4, source_names=("toy",))


@pytest.fixture
def file(tmp_path):
    """The classes stand in another order than in the dataset, as of a copy made elsewhere."""
    history = [
        {"key": "0", "distance": 1.0, "train": [7, 6, 5, 4], "test": [3, 2, 1, 0]},
        {"key": "2", "distance": 2.5, "train": [7, 6, 3, 2], "test": [5, 4, 1, 0]},
        {"key": "R1", "distance": 4.0, "train": [7, 6, 3], "test": [5, 4, 1]},
    ]
    splits = {"1": {"key": "0", "distance": 1.0}, "2": {"key": "R1", "distance": 4.0}}
    path = tmp_path / "splits.json"
    path.write_text(json.dumps({"classes": NAMES[::-1], "splits": splits, "history": history}))
    return path


def divide(text, **offered):
    part, arguments = bind("splits", text, **offered)
    return part(table(), **arguments)


def classes(rows):
    return "".join(sorted({NAMES[label] for label in table().labels[rows]}))


def test_contract():
    documentation = inspect.getdoc(find("splits", "ood"))
    for name in inspect.signature(find("splits", "ood")).parameters:
        assert re.search(rf"^\s+{name}: \S", documentation.split("Args:")[1], re.MULTILINE), name


@pytest.mark.parametrize(("which", "train", "test"), [("", "abcd", "efgh"), (", split=2", "abe", "cdg"), (", key='2'", "abef", "cdgh")])
def test_classes_by_name(file, which, train, test):
    split = divide(f"ood(path='{file}'{which})")
    assert (classes(split.train), classes(split.test)) == (train, test)
    assert len(split.train) == 4 * len(train) and len(split.validation) == 0
    assert split.name.startswith("splits.json: split ")


def test_validation_comes_out_of_training(file):
    split = divide(f"ood(path='{file}', key='2', validation=0.5)", seed=3)
    assert len(classes(split.validation)) == 2 and classes(np.concatenate([split.train, split.validation])) == "abef"
    assert split.validation.tolist() == divide(f"ood(path='{file}', key='2', validation=0.5)", seed=3).validation.tolist()


def test_distances(file):
    assert distances(str(file)) == {"1": 1.0, "2": 4.0, "key 0": 1.0, "key 2": 2.5, "key R1": 4.0}


@pytest.mark.parametrize(
    ("change", "text", "message"),
    [
        ({}, "split=3", r"splits\.json: splits has no `3`"),
        ({}, "key='R2'", r"splits\.json: history has no `R2`"),
        ({"classes": ["x", *NAMES[:0:-1]]}, "split=1", r"splits\.json: classes: unknown class `x`"),
        ({"classes": ["a", *NAMES[:0:-1]]}, "key='0', validation=0.9", "validation classes are too many"),
        ({"classes": ["b", *NAMES[:0:-1]]}, "split=1", "the class `b` is listed twice"),
        ({"classes": 3}, "split=1", "must be a list of class names"),
        ({"history": [{"key": "0", "train": [0, 1], "test": [1, 2]}]}, "split=1", "the class `g` is in both training and test"),
        ({"history": {"0": {}}}, "split=1", r"splits\.json: history must be a list of splits"),
        ({"history": [1, 2]}, "split=1", r"splits\.json: history must be a list of splits"),
        ({"history": [{"train": [0, 1], "test": [2, 3]}]}, "split=1", r"splits\.json: history must be a list of splits"),
        (
            {"history": [{"key": "0", "train": ["a"], "test": [1, 2]}]},
            "split=1",
            "split 1, train: must be a list of indices of its 8 classes",
        ),
        ({"history": [{"key": "0", "train": [0, 99], "test": [1, 2]}]}, "split=1", "split 1, train: must be a list of indices"),
        ({"history": [{"key": "0", "train": [0, 1], "test": [-1, -2]}]}, "split=1", "split 1, test: must be a list of indices"),
        ({"history": [{"key": "0", "train": [0.5, 1.5], "test": [2, 3]}]}, "split=1", "split 1, train: must be a list of indices"),
    ],
)
def test_refused(file, change, text, message):
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UnimetricError, match=message):
        divide(f"ood(path='{file}', {text})")


def test_files_that_are_none(tmp_path):
    for content, message in (("{}", "has no `history`"), ("[1]", "must hold a dictionary"), ("{", "neither JSON nor")):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(UnimetricError, match=message):
            divide(f"ood(path='{tmp_path}/x.json')")
    with pytest.raises(UnimetricError, match="cannot be read"):
        divide(f"ood(path='{tmp_path}/absent.json')")
