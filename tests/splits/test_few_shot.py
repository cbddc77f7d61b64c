"""Few pictures a training class, and the same test classes."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from unimetric.errors import UnimetricError
from unimetric.images.table import Table
from unimetric.spec import bind
from unimetric.splits.few_shot import few_shot
from unimetric.splits.standard import standard

LABELS = np.repeat(np.arange(6), [5, 2, 9, 4, 4, 4])[np.random.default_rng(0).permutation(28)]


def table() -> Table:
    return Table(paths=tuple(map(str, range(28))), labels=LABELS, class_names=tuple("abcdef"), train=LABELS < 3, source_names=("made up",))


@pytest.mark.parametrize("shots", [1, 2, 4, 8])
def test_every_training_class_has_as_many(shots: int) -> None:
    split = few_shot(table(), shots=shots)
    classes, counts = np.unique(LABELS[split.train], return_counts=True)
    assert classes.tolist() == [0, 1, 2]
    assert counts.tolist() == [shots] * 3
    for label, size in enumerate([5, 2, 9]):
        assert len(set(split.train[LABELS[split.train] == label])) == min(shots, size)
    assert split.test.tolist() == standard(table()).test.tolist()
    assert split.name == f"few_shot({shots})"


def test_fewer_shots_are_among_more_and_the_seed_decides() -> None:
    few, more = (few_shot(table(), shots=shots, seed=3).train for shots in (2, 4))
    assert set(few) <= set(more)
    assert not np.array_equal(few, few_shot(table(), shots=2, seed=4).train)
    assert np.array_equal(few, few_shot(table(), shots=2, seed=3).train)


def test_held_out_classes_keep_all_their_pictures() -> None:
    labels = np.repeat(np.arange(8), 5)
    many = Table(paths=tuple(map(str, range(40))), labels=labels, class_names=tuple("abcdefgh"), train=labels < 6, source_names=("m",))
    split = few_shot(many, shots=1, validation=0.4)
    assert len(split.validation) == 10
    assert len(split.train) == 4
    assert not set(labels[split.train]) & set(labels[split.validation])


def union_of_two() -> Table:
    source = np.arange(48) % 2
    labels = np.arange(48) // 8 * 2 + source  # twelve classes of four images, six of each dataset
    return Table(tuple(map(str, range(48))), labels, tuple("abcdefghijkl"), labels < 6, source=source, source_names=("birds", "cars"))


def test_whole_dataset_keeps_all_training_images() -> None:
    table = union_of_two()
    split = few_shot(table, shots=1, whole=("cars",))
    rows_of = [split.train[table.source[split.train] == source] for source in (0, 1)]
    assert table.labels[rows_of[0]].tolist() == [0, 2, 4]
    assert rows_of[1].tolist() == np.flatnonzero(table.train & (table.source == 1)).tolist()
    assert split.test.tolist() == standard(table).test.tolist()
    assert few_shot(table, shots=1, whole=("birds", "cars")).train.tolist() == standard(table).train.tolist()


def test_rejects_unknown_whole_dataset() -> None:
    with pytest.raises(UnimetricError, match="must name datasets of the table, got car") as caught:
        few_shot(union_of_two(), whole=("car",))
    assert caught.value.hint == "did you mean `cars`?"


def test_no_shot_is_refused() -> None:
    with pytest.raises(UnimetricError, match="shots"):
        few_shot(table(), shots=0)
    assert bind("splits", "few_shot(shots=4)")[1] == {"shots": 4}


def dogs(folder: str = "/my/data/dogs/Images/") -> Table:
    """Four training and two test classes of three images, of which the first have equal file names in each class."""
    names = [f"{folder}{letter}/{letter if number else 'same'}_{number}.jpg" for letter in "abcdef" for number in range(3)]
    labels = np.repeat(np.arange(6), 3)
    return Table(paths=tuple(names), labels=labels, class_names=tuple("abcdef"), train=labels < 4, source_names=("dogs",))


def write_list(path: Path, *, shots: int, images: list[str]) -> str:
    """Write a list in the form of the authors', with their folders."""
    content = {"ys": [0] * len(images), "I": list(range(len(images))), "im_paths": [f"/home/x/{image}" for image in images]}
    (path / f"dataset_Dogs_shot_{shots}.pkl").write_bytes(pickle.dumps(content | {"ds_ID": [0] * len(images)}, protocol=4))
    return str(path)


LISTED = [f"Images/{name}.jpg" for name in ("a/same_0", "a/a_2", "b/b_1", "b/same_0", "c/c_2", "c/c_2", "d/d_1", "d/d_2")]


def test_authors_lists_select_the_images(tmp_path: Path) -> None:
    split = few_shot(dogs(), shots=2, path=write_list(tmp_path, shots=2, images=LISTED))
    assert split.train.tolist() == [0, 2, 3, 4, 8, 8, 10, 11]  # the image that is listed twice is in both places
    assert split.test.tolist() == standard(dogs()).test.tolist() and split.name == "few_shot(2)"
    held_out = few_shot(dogs(), shots=2, path=str(tmp_path), validation=0.4)
    assert set(held_out.train) < set(split.train) and len(held_out.validation) == 6


def test_authors_lists_find_images_without_a_folder(tmp_path: Path) -> None:
    labels = np.repeat(np.arange(4), 2)
    table = Table(
        paths=tuple(f"{number}.jpg" for number in range(8)),
        labels=labels,
        class_names=tuple("abcd"),
        train=labels < 2,
        source_names=("dogs",),
    )
    path = write_list(tmp_path, shots=1, images=["car_ims/1.jpg", "car_ims/2.jpg"])
    assert few_shot(table, shots=1, path=path).train.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (["a/a_1", "b/b_9", "c/c_1", "d/d_1"], "1 of 4 images .* the first is /home/x/Images/b/b_9.jpg"),
        (["a/a_1", "b/b_1", "c/c_1", "e/e_1"], "not among the training images"),
        (["a/a_1", "b/b_1", "c/c_1"], "1 images of each training class"),
        (["a/a_1", "a/a_2", "b/b_1", "c/c_1", "d/d_1"], "1 images of each training class"),
    ],
)
def test_authors_lists_must_fit_the_dataset(images: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnimetricError, match=message) as raised:
        few_shot(dogs(), shots=1, path=write_list(tmp_path, shots=1, images=[f"Images/{image}.jpg" for image in images]))
    assert "dataset_Dogs_shot_1.pkl" in raised.value.message


def test_authors_lists_reject_other_datasets_and_programs(tmp_path: Path) -> None:
    with pytest.raises(UnimetricError, match="no list of `made up`"):
        few_shot(table(), path=str(tmp_path))
    with pytest.raises(UnimetricError, match=r"dataset_Dogs_shot_4\.pkl: cannot be read"):
        few_shot(dogs(), shots=4, path=str(tmp_path))
    (tmp_path / "dataset_Dogs_shot_1.pkl").write_bytes(pickle.dumps({"im_paths": [Path("x")]}))
    with pytest.raises(UnimetricError, match="only lists, dicts, strings and numbers"):
        few_shot(dogs(), path=str(tmp_path))
