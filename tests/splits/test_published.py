import copy
import json
import logging
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from unimetric.errors import UnimetricError
from unimetric.images.table import Table
from unimetric.spec import bind
from unimetric.splits._file import read
from unimetric.splits.ood import distances
from unimetric.splits.published import episodes

NAMES = ("Ram C/V Van", "b", "c", "d", "e", "f", "g", "h")
FOLDER_NAMES = ["Ram C-V Van", *NAMES[1:]]


def table():
    """Eight classes of four pictures, two from each of two folders; in the last class a name is in both."""
    names = [
        f"{folder}/{10 * label + number}.jpg" for label in range(8) for number, folder in enumerate(("train", "train", "test", "test"))
    ]
    names[31] = "test/70.jpg"
    return Table(tuple(names), np.repeat(np.arange(8), 4), NAMES, np.repeat(np.arange(8), 4) < 4, source_names=("toy",))


def episode(shots, seed):
    rng = np.random.default_rng(seed)
    return {FOLDER_NAMES[label]: [f"{10 * label + int(n)}.jpg" for n in rng.permutation(3)[:shots]] for label in (0, 2, 4, 6)}


def content():
    return {
        "1": {
            "fid": 8.5,
            "train": [FOLDER_NAMES[label] for label in (1, 3, 5, 7)],
            "test": [FOLDER_NAMES[label] for label in (0, 2, 4, 6)],
            "split_train": ["b", "d"],
            "split_val": ["f", "h"],
            "test_episodes": {"2": {"0": episode(2, 0), "1": episode(2, 1)}},
        },
        "2": {"fid": 9.5, "train": FOLDER_NAMES[:3], "test": FOLDER_NAMES[5:]},
    }


def divide(path, text=""):
    part, arguments = bind("splits", f"published(path='{path}'{text})", seed=0)
    return part(table(), **arguments)


def classes(rows):
    return sorted(set(table().labels[rows].tolist()))


@pytest.fixture(params=["json", "pickle 2", "pickle 4"])
def path(request, tmp_path):
    """The same file in each form; the pickle as the authors', with numbers for keys and numpy scalars in it."""
    kind, _, protocol = request.param.partition(" ")
    file = tmp_path / f"splits.{kind}"
    if kind == "json":
        file.write_text(json.dumps(content()))
    else:
        numbered = {int(key): value for key, value in content().items()}
        numbered[1]["fid"] = np.float64(8.5)
        numbered[1]["train"] = [np.str_(name) for name in numbered[1]["train"]]  # as in the authors' file for Cars196
        numbered[1]["test_episodes"] = {2: {int(key): value for key, value in numbered[1]["test_episodes"]["2"].items()}}
        file.write_bytes(pickle.dumps(numbered, protocol=int(protocol)))
    return str(file)


def test_ood_reads_published_files(path):
    for text in ("", ", split=2"):
        published_, found = (bind("splits", f"{name}(path='{path}'{text})", seed=0) for name in ("published", "ood"))
        one, other = (part(table(), **arguments) for part, arguments in (published_, found))
        assert [rows.tolist() for rows in (one.train, one.test)] == [rows.tolist() for rows in (other.train, other.test)]
    part, arguments = bind("splits", f"ood(path='{path}', validation=0.25)", seed=0)
    assert classes(part(table(), **arguments).validation) == [5, 7]
    part, arguments = bind("splits", f"ood(path='{path}', key='R2')", seed=0)
    with pytest.raises(UnimetricError, match="has no `history`"):
        part(table(), **arguments)


def test_classes_of_sop_by_file_name(tmp_path):
    """The authors name a class of SOP by the number before the underscore of its files, not by its category and id."""
    labels = np.repeat(np.arange(8), 2)
    paths = tuple(f"bicycle_final/{111085122871 + 7 * label}_{number}.JPG" for label in range(8) for number in range(2))
    sop = Table(paths, labels, tuple(f"bicycle/{label + 1}" for label in range(8)), labels < 4, source_names=("sop",))
    names = [str(111085122871 + 7 * label) for label in range(8)]
    file = tmp_path / "splits.json"
    file.write_text(json.dumps({"1": {"fid": 1.0, "train": names[4:], "test": names[:4]}}))
    part, arguments = bind("splits", f"published(path='{file}')", seed=0)
    split = part(sop, **arguments)
    assert set(sop.labels[split.train]) == {4, 5, 6, 7} and set(sop.labels[split.test]) == {0, 1, 2, 3}
    file.write_text(json.dumps({"1": {"fid": 1.0, "train": [*names[4:], "3"], "test": names[:4]}}))
    with pytest.raises(UnimetricError, match="unknown class"):
        part(sop, **arguments)


def test_every_form(path):
    split = divide(path)
    assert classes(split.train) == [1, 3, 5, 7] and classes(split.test) == [0, 2, 4, 6] and len(split.validation) == 0
    assert read(path)["1"]["fid"] == 8.5
    few = divide(path, ", split=2")
    assert classes(few.train) == [0, 1, 2] and classes(few.test) == [5, 6, 7]
    held_out = divide(path, ", validation=True")
    assert classes(held_out.train) == [1, 3] and classes(held_out.validation) == [5, 7]


def test_episodes_become_rows(path):
    found = episodes(table(), path=path, split=1, shots=2)
    assert len(found) == 2 and found[0].tolist() != found[1].tolist()
    for rows, seed in zip(found, (0, 1), strict=True):
        wanted = [name for pictures in episode(2, seed).values() for name in pictures]
        assert [os.path.basename(table().paths[row]) for row in rows] == wanted
        assert np.bincount(table().labels[rows], minlength=8).tolist() == [2, 0] * 4
    assert episodes(table(), path=path, split=1, shots=5) == []


def write(tmp_path, change):
    entry = content()
    change(entry["1"])
    (tmp_path / "splits.json").write_text(json.dumps(entry))
    return str(tmp_path / "splits.json")


def test_the_second_of_two_equal_names(tmp_path):
    def change(entry):
        entry["train"][3], entry["test"][3] = "g", "h"
        for number in "01":
            group = entry["test_episodes"]["2"][number]
            del group["g"]
            group["h"] = ["70_2.jpg", "71.jpg"] if number == "0" else ["70.jpg", "72.jpg"]

    found = episodes(table(), path=write(tmp_path, change), split=1, shots=2)
    assert found[0].tolist()[-2:] == [31, 29] and found[1].tolist()[-2:] == [28, 30]


def lose(entry):
    entry["test_episodes"]["2"]["1"]["c"][0] = "99.jpg"


def test_absent_picture(tmp_path, caplog):
    path = write(tmp_path, lose)
    with pytest.raises(UnimetricError, match=r"splits\.json: split 1: its episodes list 1 missing images, the first is `99\.jpg` of `c`"):
        divide(path)
    with caplog.at_level(logging.WARNING, "unimetric"):
        assert [len(rows) for rows in episodes(table(), path=path, split=1, shots=2, on_missing="skip")] == [8, 7]
    assert "`99.jpg` of `c`; they are skipped" in caplog.text
    with pytest.raises(UnimetricError, match="`on_missing` must be one of `error`, `skip`, got 'skipp'"):
        divide(path, ", on_missing='skipp'")


def test_pictures_called_otherwise(tmp_path):
    path = write(tmp_path, lambda entry: None)
    other = copy.copy(table())
    object.__setattr__(other, "paths", tuple(f"car_ims/0000{row}.jpg" for row in range(32)))
    with pytest.raises(UnimetricError, match="must have the names in the dataset") as caught:
        episodes(other, path=path, split=1, shots=2, on_missing="skip")
    assert "car_ims" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: entry["train"].append("Ram"), r"split 1, train: unknown class `Ram`"),
        (lambda entry: entry["train"].append("b"), "train: the class `b` is listed twice"),
        (lambda entry: entry["train"].append("c"), "the class `c` is in both training and test"),
        (lambda entry: entry.pop("test"), "split 1 has no `test`"),
        (lambda entry: entry["split_val"].append("c"), "split_val: the class `c` must be one of its training classes"),
        (lambda entry: entry["split_val"].append("b"), "the class `b` is in both split_train and split_val"),
        (lambda entry: entry["test_episodes"]["2"]["0"].pop("e"), "2 shots, episode 0: its classes must be the test classes"),
        (lambda entry: entry["test_episodes"]["2"]["0"]["e"].pop(), "episode 0: the class `e` must have 2 different images"),
        (lambda entry: entry["test_episodes"]["2"]["0"].update(e=["40.jpg"] * 2), "the class `e` must have 2 different images"),
        (lambda entry: entry["test_episodes"]["2"]["0"].update(e=[["40.jpg"], ["41.jpg"]]), "its episodes list 2 missing images"),
        (lambda entry: entry.update(test_episodes=["2"]), "split 1: its test_episodes must be nested tables"),
        (lambda entry: entry["test_episodes"].update({"2": ["0"]}), "its test_episodes must be nested tables"),
        (lambda entry: entry["test_episodes"]["2"].update({"0": ["e"]}), "its test_episodes must be nested tables"),
    ],
)
def test_refused(tmp_path, change, message):
    with pytest.raises(UnimetricError, match=message):
        divide(write(tmp_path, change), ", validation=True")


def test_unknown_split(path):
    with pytest.raises(UnimetricError, match="has no `7`") as caught:
        divide(path, ", split=7")
    assert "1, 2" in caught.value.hint


class Trap:
    """What a pickle could do to its reader."""

    def __reduce__(self):
        return os.mkdir, ("trapped",)


def test_a_pickle_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for protocol in range(6):
        (tmp_path / "trap.pkl").write_bytes(pickle.dumps({"1": Trap()}, protocol=protocol))
        with pytest.raises(UnimetricError, match=r"trap\.pkl: a pickle may hold only .* got `(posix|nt|os)\.mkdir`"):
            read("trap.pkl")
    (tmp_path / "trap.pkl").write_bytes(pickle.dumps(np.arange(3)))
    with pytest.raises(UnimetricError, match="a pickle may hold only"):
        read("trap.pkl")
    (tmp_path / "trap.pkl").write_bytes(pickle.dumps({"1": b"bytes"}))
    with pytest.raises(UnimetricError, match="got a bytes"):
        read("trap.pkl")
    (tmp_path / "trap.pkl").write_bytes(pickle.dumps({"1": 2})[:-3])
    with pytest.raises(UnimetricError, match="neither JSON nor a plain pickle"):
        read("trap.pkl")
    assert os.listdir(tmp_path) == ["trap.pkl"]


def test_the_authors_splits_of_cars196():
    """Their file, where the folder UNIMETRIC_DATA or its `data/` has it: sizes, exchanged classes, distances."""
    data = Path(os.environ.get("UNIMETRIC_DATA", "/nowhere"))
    found = [folder / "oodml_cars196_splits.json" for folder in (data, data / "data") if (folder / "oodml_cars196_splits.json").is_file()]
    if not found:
        pytest.skip("UNIMETRIC_DATA points to no folder that has oodml_cars196_splits.json")
    file = read(str(found[0]))
    sides = [(set(file[str(number)]["train"]), set(file[str(number)]["test"])) for number in range(1, 9)]
    assert [(len(train), len(test)) for train, test in sides] == [(count, count) for count in (98, 98, 98, 98, 98, 86, 74, 62)]
    assert [len(train & sides[0][1]) for train, _ in sides] == [0, 6, 16, 20, 30, 39, 31, 24]
    printed = [8.59, 14.33, 32.18, 43.58, 63.29, 86.12, 101.17, 123.03]  # the sixth is 86.48 in the paper's table
    assert list(distances(str(found[0])).values()) == pytest.approx(printed, abs=0.006)
