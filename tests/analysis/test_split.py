import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from unimetric.analysis.split import chosen, features_of, make_splits, read_features, write_splits
from unimetric.analysis.swapping import PAPER_TARGETS, Step
from unimetric.config import from_settings
from unimetric.errors import UnimetricError
from unimetric.images.table import Table
from unimetric.runs.rows import read_table


def birds(seed=0):
    """Thirty classes of six pictures, scattered; every other one trains."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(30), 6))
    features = (rng.standard_normal((30, 10)) * 2)[labels] + 0.3 * rng.standard_normal((180, 10))
    return Table(tuple(f"{row}.jpg" for row in range(180)), labels, tuple(f"bird {n}" for n in range(30)), labels % 2 == 0), features


def test_the_file_is_read_back_by_a_split(tmp_path):
    table, features = birds()
    splits = make_splits(table, features, count=8, easier=5, choose=4)
    keys = [step["key"] for step in splits["history"]]
    assert keys[:10] == ["-8", "-6", "-4", "-2", "0", "2", "4", "6", "8", "10"] and keys[12:14] == ["R2", "R4"]
    path = tmp_path / "splits.json"
    write_splits(path, splits, {"dataset": "birds"})
    assert json.loads(path.read_text())["dataset"] == "birds"
    assert (tmp_path / "splits.png").read_bytes().startswith(b"\x89PNG")
    from unimetric.splits.ood import ood

    assert set(table.labels[ood(table, path=str(path), key="0").train]) == set(range(0, 30, 2))
    chosen = [splits["splits"][number]["distance"] for number in "1234"]
    assert chosen == sorted(chosen)
    distances = [step["distance"] for step in splits["history"]]
    assert chosen[0] == min(distances) and chosen[-1] == max(distances)
    assert splits["no_shift"] < 0.5 * chosen[0]
    for number in "1234":
        split = ood(table, path=str(path), split=int(number))
        assert not set(table.labels[split.train]) & set(table.labels[split.test])
        assert len(split.train) + len(split.test) >= 90


def test_same_seed_makes_same_file():
    first, second = (make_splits(*birds(), count=6, choose=3) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_targets_are_multiples_of_own_split(scale):
    table, features = birds()
    splits = make_splits(table, features * scale, count=6, targets=(2.0, 1.4))
    distances = {step["key"]: step["distance"] for step in splits["history"]}
    own = distances["0"]
    assert [entry["target"] / own for entry in splits["splits"].values()] == pytest.approx([1.0, 1.4, 2.0])
    assert [entry["key"] for entry in splits["splits"].values()] == [
        min(distances, key=lambda key: abs(distances[key] - target * own)) for target in (1.0, 1.4, 2.0)
    ]


def test_own_split_is_always_chosen(caplog):
    table, features = birds()
    for choose in (1, 2, 5, 9):
        splits = make_splits(table, features, count=6, choose=choose)["splits"]
        assert "0" in [entry["key"] for entry in splits.values()] and len(splits) == choose
    assert not caplog.records
    splits = make_splits(table, features, count=6, targets=(1.0001, 1.0002, 1.0003))["splits"]
    assert "0" in [entry["key"] for entry in splits.values()]
    make_splits(table, features, count=6, targets=(0.01, 1.2, 900.0))
    assert "but the targets 0.01, 900 are outside; they get" in caplog.text
    caplog.clear()
    make_splits(table, features, count=6, targets=(0.01, 1.0, 900.0))  # one of them is reached
    assert "but the targets 0.01, 900 are outside; they get" in caplog.text
    with pytest.raises(UnimetricError, match=r"but the targets 19\.2, 28\.5 are outside") as error:
        make_splits(table, features, count=6, targets=(19.2, 28.5))
    assert error.value.hint.startswith("targets are multiples of that distance: use numbers from 0.")


def test_targets_of_the_paper_on_measured_cub_splits(caplog):
    """The sequence of splits that was measured on CUB200 with other weights than the paper's."""
    history = json.loads((Path(__file__).parents[2] / "results" / "splits_cub200.json").read_text())["history"]
    none = np.zeros(0, np.int64)  # the file has no classes; each step gets one of its own
    steps = [Step(entry["key"], np.array([number]), none, entry["distance"], 1.0) for number, entry in enumerate(history)]
    found = list(chosen(steps, choose=9, targets=PAPER_TARGETS["cub200"]).values())
    assert [entry["key"] for entry in found] == ["-22", "-10", "0", "8", "12", "R4", "R14", "R22", "R36"]
    distances = [entry["distance"] for entry in found]
    assert distances == sorted(set(distances)) and found[2]["distance"] == 113.447
    for entry, target in zip(found[1:], PAPER_TARGETS["cub200"][1:], strict=True):
        assert entry["distance"] / 113.447 == pytest.approx(target, rel=0.05)
    assert "the splits have 0.388 to 3.72 times" in caplog.text and "targets 0.364 are outside" in caplog.text


def test_classes_must_be_divided():
    table, features = birds()
    object.__setattr__(table, "train", np.arange(180) < 90)
    with pytest.raises(UnimetricError, match="at least three training classes"):
        make_splits(table, features)


def test_features_are_made_once_and_checked(config, tmp_path):
    path = tmp_path / "features.npz"
    table, made = features_of(config, path=path)
    assert made.shape == (len(table), 16) and path.exists()
    assert np.array_equal(made, features_of(config, path=path)[1])
    for key, text in (("backbone", "small(channels=8)"), ("transform", "glyphs(size=24)")):
        with pytest.raises(UnimetricError, match=re.escape(f"of {key} `{text}`, got those of `{getattr(config, key)}`")):
            features_of(from_settings(asdict(config) | {key: text}), path=path)
    with pytest.raises(UnimetricError, match="of the dataset in their order"):
        read_features(path, table.take(np.arange(len(table))[::-1]))
    np.savez(path, embeddings=np.full_like(made, np.nan), labels=table.labels)
    with pytest.raises(UnimetricError, match="not finite"):
        read_features(path, table)
    path.write_text("no")
    with pytest.raises(UnimetricError, match=r"features\.npz: must be an intact \.npz file"):
        features_of(config, path=path)


def test_features_of_other_images_are_rejected(config, tmp_path):
    """Datasets with the same numbers of images per class differ in their files."""
    rng = np.random.default_rng(0)

    def write(name, suffix=""):
        for number in range(8):
            image = tmp_path / name / f"class{number // 4}" / f"{number}{suffix}.png"
            image.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (36, 36 + len(name), 3), dtype=np.uint8)).save(image)
        return from_settings(asdict(config) | {"dataset": f"folder(root={str(tmp_path / name)!r})", "workers": 0})

    path, first = tmp_path / "features.npz", write("a")
    table, made = features_of(first, path=path)
    for other in (write("b", "x"), write("longer")):  # other names, other sizes
        with pytest.raises(UnimetricError, match="must have the images of the dataset"):
            features_of(other, path=path)
    shutil.copytree(tmp_path / "a", tmp_path / "copy", copy_function=shutil.copyfile)
    copy = from_settings(asdict(first) | {"dataset": f"folder(root={str(tmp_path / 'copy')!r})"})
    assert np.array_equal(features_of(copy, path=path)[1], made)
    np.savez(path, embeddings=made, labels=table.labels)  # as earlier versions have written it
    assert np.array_equal(features_of(first, path=path)[1], made)


def test_repeated_splits_are_selected_once(caplog):
    """With few classes, the swaps return to earlier splits."""
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(14), 6)
    features = (rng.standard_normal((14, 10)) * 2)[labels] + 0.3 * rng.standard_normal((84, 10))
    table = Table(tuple(f"{row}.jpg" for row in range(84)), labels, tuple(map(str, range(14))), labels % 2 == 0)
    splits = make_splits(table, features)
    sides = {step["key"]: (frozenset(step["train"]), frozenset(step["test"])) for step in splits["history"]}
    different = len(set(sides.values()))
    assert different < len(sides)
    keys = [entry["key"] for entry in splits["splits"].values()]
    assert len({sides[key] for key in keys}) == len(keys) == 9 and "0" in keys and not caplog.records
    assert len(make_splits(table, features, choose=99)["splits"]) == different
    assert f"only {different} different splits, so {different} are selected instead of 99" in caplog.text


def test_error_of_the_backbone_names_the_option(config):
    backbone = "timm(name='resnet10t', weights='absent.safetensors')"
    with pytest.raises(UnimetricError, match=r"`--backbone \"timm\(name='resnet10t'.*`: absent.safetensors: no such weights file"):
        features_of(from_settings(asdict(config) | {"backbone": backbone}))


def test_features_are_the_summaries(config):
    from unimetric.images.loading import View, open_pictures
    from unimetric.runs.model import build_model
    from unimetric.spec import create

    table, features = features_of(config)
    model = build_model(config).eval()
    pictures = open_pictures(table, device=torch.device("cpu"), mean=model.mean, std=model.std)
    with torch.no_grad():
        images = next(pictures.load([(np.arange(5), View(create("transforms", config.transform)))]))
        assert np.allclose(model.backbone(images)[:, 0].numpy(), features[:5], atol=1e-5)
    assert len(read_table(config)[0]) == len(features)


def test_pictures_that_cannot_be_read_are_left_out_where_the_settings_say_so(config, tmp_path):
    rng = np.random.default_rng(0)
    for number in range(21):
        picture = tmp_path / "pictures" / f"class{number // 3}" / f"{number}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (36, 36, 3), dtype=np.uint8)).save(picture)
    bad = [picture.parents[1] / name for name in ("class0/0.png", "class0/1.png", "class0/2.png", "class6/18.png")]
    for each in bad:
        each.write_bytes(b"")
    settings = asdict(config) | {"dataset": f"folder(root={str(tmp_path / 'pictures')!r})", "workers": 0}
    with pytest.raises(UnimetricError, match=str(bad[0])):
        features_of(from_settings(settings))
    skip = from_settings(settings | {"on_bad_picture": "skip"})
    table, features = features_of(skip, path=tmp_path / "features.npz")
    assert len(table) == len(features) == 17 and not set(map(str, bad)) & set(table.paths)
    again, kept = features_of(skip, path=tmp_path / "features.npz")
    assert again.paths == table.paths and np.array_equal(kept, features)
    write_splits(tmp_path / "splits.json", make_splits(table, features, count=1, easier=1, removal=False, choose=1), {})
    whole, split = read_table(from_settings(settings | {"split": f"ood(path={str(tmp_path / 'splits.json')!r})"}))
    assert set(whole.labels[np.concatenate([split.train, split.test])]) == set(range(1, 7))  # a class without a picture is on neither side
