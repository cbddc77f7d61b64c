"""`unimetric train images/`: settings by the content of a folder and by the device."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from unimetric.cli.train import _is_setting, _load, train
from unimetric.config import load
from unimetric.errors import UnimetricError
from unimetric.runs.choices import choose_settings
from unimetric.training.demo import SETTINGS

TINY = ["device=cpu", "transform=base(size=32, resize=36)", "backbone=small(channels=16)", "batch_size=8", "epochs=1", "workers=0"]


def draw(root: Path, layout: str, classes: int, *, parts: tuple[str, ...] = ("",), count: int = 4) -> Path:
    rng = np.random.default_rng(0)
    for part in parts:
        for number in range(classes):
            folder = root / layout.format(part=part, name=f"c{number:02}", group=f"g{number % 2}")
            folder.mkdir(parents=True)
            for image in range(count):
                noise = rng.integers(0, 256, (40, 48, 3), dtype=np.uint8) // 4 + 9 * number
                Image.fromarray(noise.astype(np.uint8)).save(folder / f"{image}.png")
    return root


def test_train_on_a_folder_prints_an_equivalent_config(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    root = draw(tmp_path / "images", "{group}/{name}", 20)
    train(str(root), [*TINY, "logger=none"], tmp_path / "run", False)
    out = capsys.readouterr().out
    assert "config `laptop`" in out and "80 images of 20 classes" in out
    assert "32 training images of 8 classes; 2 validation classes; 10 test classes" in out
    text = out.split("`unimetric train`:\n\n")[1].split("\n\n")[0].partition("training on")[0]
    settings = tomllib.loads("\n".join(line for line in text.splitlines() if " = " in line))
    assert load(tmp_path / "run" / "config.toml") == load(**settings)
    assert settings["loss"] == load("laptop").loss and settings["dataset"].startswith("folder(")


def test_classes_in_both_parts_are_split_in_halves(tmp_path: Path) -> None:
    root = draw(tmp_path, "{part}/{name}", 20, parts=("train", "test"))
    config, notes = choose_settings(str(root), {"device": "cpu"})
    assert "train=0.5" in config.dataset and any("half of all classes become test classes" in note for note in notes)
    assert config.split == "standard(validation=0.2)"


def test_training_part_alone_is_split_in_halves(tmp_path: Path) -> None:
    config, _ = choose_settings(str(draw(tmp_path, "{part}/{name}", 6, parts=("train",))), {"device": "cpu"})
    assert "train=0.5" in config.dataset
    assert config.split == "standard"  # three training classes


def test_epochs_follow_the_number_of_images(tmp_path: Path) -> None:
    few, _ = choose_settings(str(draw(tmp_path / "few", "{name}", 4)), {"device": "cpu"})
    many, _ = choose_settings(str(draw(tmp_path / "many", "{name}", 4, count=600)), {"device": "cpu"})
    assert (few.epochs, few.evaluate_every, many.epochs) == (20, 5, 5)
    assert choose_settings(str(tmp_path / "few"), {"device": "cpu", "epochs": 3})[0].epochs == 3


def test_split_of_the_user_is_the_one_described(tmp_path: Path) -> None:
    config, notes = choose_settings(str(draw(tmp_path, "{name}", 12)), {"device": "cpu", "split": "standard(validation=0.34)"})
    assert config.split == "standard(validation=0.34)"
    assert "2 validation classes" in notes[-1] and not any("chosen on the test classes" in note for note in notes)


def test_slash_after_the_folder_is_the_same_run(tmp_path: Path) -> None:
    """The shell adds one when it completes a name."""
    root = draw(tmp_path, "{name}", 4)
    ids = {choose_settings(name, {"device": "cpu"})[0].run_id for name in (f"{root}", f"{root}/", f"{root}/.")}
    assert len(ids) == 1


def test_gpu_gets_the_foundation_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    root = str(draw(tmp_path, "{name}", 4))
    assert choose_settings(root, {})[0].backbone == load("foundation").backbone
    assert choose_settings(root, {"device": "cpu"})[0].backbone == load("laptop").backbone


def test_run_folder_is_not_a_folder_of_images(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("seed = 1\n")
    with pytest.raises(UnimetricError, match="is a run folder"):
        choose_settings(str(tmp_path), {})


def test_without_dataset_the_settings_are_those_of_the_demo(capsys: pytest.CaptureFixture) -> None:
    config = _load(None, ["seed=3"])
    assert config == load(**SETTINGS, seed=3) and config.transform == "glyphs"
    assert "unimetric demo" in capsys.readouterr().out
    assert _load("dataset=cub200", []).transform == "base"


def test_folder_of_too_few_classes_is_named_with_its_path(tmp_path: Path) -> None:
    root = draw(tmp_path / "bad" / "one", "{name}", 3)
    with pytest.raises(UnimetricError, match=f"^{root}: at least 4 classes are needed, .* got 3") as caught:
        choose_settings(str(root), {"device": "cpu"})
    assert "train=" not in caught.value.hint


@pytest.mark.parametrize("name", ["absent/", "images/absent"])
def test_absent_folder_is_called_a_folder(name: str) -> None:
    with pytest.raises(UnimetricError, match=f"^{name}: no such folder") as caught:
        _load(name, [])
    assert "subfolder" in caught.value.hint


@pytest.mark.parametrize(("name", "call"), [("a b.pack", "pack(path='a b.pack')"), ("shoes.csv", "csv(file='shoes.csv')")])
def test_dataset_in_place_of_a_config_is_named(name: str, call: str) -> None:
    with pytest.raises(UnimetricError, match=f"^{name}: is a dataset") as caught:
        _load(name, [])
    assert shlex.split(caught.value.hint.strip("`"))[-1] == f"dataset={call}"


def test_folder_name_may_have_an_equals_sign(tmp_path: Path) -> None:
    root = draw(tmp_path / "year=2024", "{name}", 4)
    assert load("laptop").dataset != _load(str(root), ["device=cpu"], quiet=True).dataset
    with pytest.raises(UnimetricError, match="unknown key `sed`"):
        _load("sed=3", [])


@pytest.mark.parametrize("word", ["(" * 5000 + "=small", "a\0b=small"])
def test_words_that_no_path_can_have_are_settings(word: str) -> None:
    with pytest.raises(UnimetricError, match="unknown key"):
        _load(None, [word])
    assert _is_setting(word)


def test_folder_and_dataset_contradict_each_other(tmp_path: Path) -> None:
    """The number of epochs and the split would be those of the folder, the images those of the dataset."""
    with pytest.raises(UnimetricError, match="is a folder of images, and `dataset` names other images"):
        _load(str(tmp_path), ["dataset=cub200"])
