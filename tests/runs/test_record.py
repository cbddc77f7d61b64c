"""The images and files of a run cannot change unseen: `data.json`, checksums of weights, and the settings stored with them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.conftest import changed, interrupt

from unimetric.analysis.evaluate import evaluate
from unimetric.config import RunConfig, load
from unimetric.errors import UnimetricError
from unimetric.images import packing
from unimetric.images.pack import Pack, decode
from unimetric.report.folders import read_runs
from unimetric.runs.device import open_fabric
from unimetric.runs.display import Display
from unimetric.runs.folder import check_same_run
from unimetric.runs.record import (
    RECORD,
    check_files,
    describe_images,
    finished_lines,
    read_images,
    read_record,
    record_images,
    seal_files,
    write_record,
)
from unimetric.runs.rows import read_table
from unimetric.runs.weights import hash_tensors, read_tensors, write_tensors
from unimetric.training.checkpoint import check_data, resume
from unimetric.training.loop import train
from unimetric.training.state import build_training_state


@pytest.fixture(scope="module")
def drawn(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The letters as PNG files, one folder per class."""
    folder = tmp_path_factory.mktemp("drawn")
    table = Pack.open(letters).table
    labels = np.unique(table.labels, return_inverse=True)[1]
    for number, (path, label) in enumerate(zip(table.paths, labels, strict=True)):
        file = folder / f"class{label:02}" / f"{number:03}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(decode(path)).save(file)
    return folder


@pytest.fixture
def images(drawn: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(drawn, tmp_path / "images"))


@pytest.fixture
def streamed(config: RunConfig, images: Path) -> RunConfig:
    return changed(config, dataset=f"folder(root='{images}')", workers=0, epochs=2)


def repaint(images: Path) -> str:
    file = next(images.glob("class00/*"))
    Image.effect_noise((32, 32), 90).convert("RGB").save(file)
    return file.name


def move(images: Path) -> str:
    file = next(images.glob("class00/*"))
    file.rename(images / "class01" / file.name)
    return file.name


def add(images: Path) -> str:
    shutil.copy(next(images.glob("class00/*")), images / "class00" / "new.png")
    return "new.png"


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (repaint, "1 changed, 0 added, 0 removed"),
        (move, "0 changed, 1 added, 1 removed"),
        (add, "0 changed, 1 added, 0 removed"),
    ],
)
def test_changed_images_are_refused_on_resume(
    streamed: RunConfig, images: Path, tmp_path: Path, change: Callable[[Path], str], counts: str
) -> None:
    folder = tmp_path / "run"
    interrupt(streamed, folder)
    before = (folder / "checkpoint.safetensors").read_bytes()
    name = change(images)
    with pytest.raises(UnimetricError, match="images have changed since the run started") as refused:
        train(streamed, folder, quiet=True)
    assert counts in refused.value.message and name in refused.value.message
    assert "another --out" in refused.value.hint and RECORD in refused.value.hint
    assert (folder / "checkpoint.safetensors").read_bytes() == before
    assert not (folder / "done").exists()


def test_refused_run_with_more_epochs_stays_finished(streamed: RunConfig, images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    best = train(streamed, folder, quiet=True)
    repaint(images)
    with pytest.raises(UnimetricError, match="images have changed since the run started"):
        train(changed(streamed, epochs=3), folder, quiet=True)
    assert train(streamed, folder, quiet=True) == best


def test_unchanged_images_resume_and_evaluate(streamed: RunConfig, images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupt(streamed, folder)
    train(streamed, folder, quiet=True)
    assert evaluate(folder)
    shutil.copytree(images, tmp_path / "elsewhere")  # with the modification times
    assert evaluate(folder, dataset=f"folder(root='{tmp_path / 'elsewhere'}')") == evaluate(folder)
    test = next(images.glob("class11/*"))
    os.utime(test, ns=(0, 0))
    with pytest.raises(UnimetricError, match=rf"1 changed, 0 added, 0 removed \(class11/{test.name}\)"):
        evaluate(folder)
    assert evaluate(folder, part="train")  # those have not changed
    (folder / RECORD).unlink()
    assert evaluate(folder)


def test_swapped_pack_is_refused(config: RunConfig, letters: Path, tmp_path: Path) -> None:
    pack = tmp_path / "own.pack"
    shutil.copy(letters, pack)
    config = changed(config, dataset=f"pack(path='{pack}')", epochs=2)
    interrupt(config, tmp_path / "run")
    table = Pack.open(letters).table
    packing.write(pack, table, short_side=None, encoding="raw", read=lambda path: 255 - decode(path))  # the same names, sizes and labels
    with pytest.raises(UnimetricError, match=r"own\.pack has other content"):
        train(config, tmp_path / "run", quiet=True)
    shutil.copy(letters, pack)
    train(config, tmp_path / "run", quiet=True)
    packing.write(pack, table, short_side=None, encoding="raw", read=lambda path: 255 - decode(path))
    with pytest.raises(UnimetricError, match=r"own\.pack has other content"):
        evaluate(tmp_path / "run")


def test_changed_split_file_is_refused(streamed: RunConfig, images: Path, tmp_path: Path) -> None:
    splits = tmp_path / "splits.json"
    write_split(splits, images)
    config = changed(streamed, split=f"ood(path='{splits}')")
    interrupt(config, tmp_path / "run")
    write_split(splits, images, swapped=True)
    with pytest.raises(UnimetricError, match=r"0 changed, \d+ added, \d+ removed"):
        train(config, tmp_path / "run", quiet=True)


def write_split(path: Path, images: Path, *, swapped: bool = False) -> None:
    classes = sorted(each.name for each in images.iterdir())
    half = len(classes) // 2
    train, test = list(range(half)), list(range(half, len(classes)))
    if swapped:
        train[0], test[0] = test[0], train[0]
    step = {"key": "0", "distance": 1.0, "train": train, "test": test}
    content = {"classes": classes, "history": [step], "splits": {"1": {"key": "0", "distance": 1.0, "target": 1.0}}}
    path.write_text(json.dumps(content))


def test_changed_roles_and_groups_are_rejected(config: RunConfig, drawn: Path, tmp_path: Path) -> None:
    paths = sorted(drawn.glob("*/*.png"))
    rows = [[str(path), path.parent.name, "True", "True", str(number % 3)] for number, path in enumerate(paths)]

    def write(rows: list[list[str]]) -> None:
        lines = [["path", "label", "is_query", "is_gallery", "camera"], *rows]
        (tmp_path / "list.csv").write_text("\n".join(map(",".join, lines)))

    write(rows)
    config = changed(config, dataset=f"csv(file='{tmp_path / 'list.csv'}')", workers=0, epochs=2)
    interrupt(config, tmp_path / "run")
    record = read_record(tmp_path / "run")
    for column, value in ((2, "False"), (3, "False"), (4, "7")):
        write([*rows[:-1], [*rows[-1][:column], value, *rows[-1][column + 1 :]]])
        with pytest.raises(UnimetricError, match="have changed since the run started: test images have other roles"):
            train(config, tmp_path / "run", quiet=True)
    for part in ("train", "validation", "test"):  # as an earlier version wrote it
        record[part].pop("roles")
    write_record(tmp_path / "run", record)
    train(config, tmp_path / "run", quiet=True)


def test_changed_images_of_watched_datasets_are_rejected(config: RunConfig, images: Path, tmp_path: Path) -> None:
    config = changed(config, epochs=2, workers=0, watch_datasets=[f"folder(root='{images}')"])
    interrupt(config, tmp_path / "run")
    file = next(images.glob("class11/*"))
    content, status = file.read_bytes(), file.stat()
    file.write_bytes(content)  # another time
    with pytest.raises(UnimetricError, match=r"the images of `folder.*` have changed since the run started"):
        train(config, tmp_path / "run", quiet=True)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    train(config, tmp_path / "run", quiet=True)


def test_folder_without_record_resumes_with_a_note(config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = changed(config, epochs=2)
    interrupt(config, tmp_path / "run")
    (tmp_path / "run" / RECORD).unlink()
    train(config, tmp_path / "run")
    assert capsys.readouterr().out.count("no data.json, so the images are not compared") == 1
    assert (tmp_path / "run" / RECORD).exists()


def test_weights_of_another_run_are_refused(config: RunConfig, tmp_path: Path) -> None:
    for seed in (0, 1):
        train(changed(config, seed=seed, epochs=1), tmp_path / str(seed), quiet=True)
    shutil.copy(tmp_path / "1" / "model.safetensors", tmp_path / "0" / "model.safetensors")
    with pytest.raises(UnimetricError, match=r"config\.toml: `seed` is 0, but model\.safetensors was trained with 1"):
        evaluate(tmp_path / "0")
    shutil.copy(tmp_path / "1" / "checkpoint.safetensors", tmp_path / "0" / "checkpoint.safetensors")
    (tmp_path / "0" / "done").unlink()
    with pytest.raises(UnimetricError, match=r"config\.toml: `seed` is 0, but checkpoint\.safetensors was trained with 1"):
        train(changed(config, epochs=1), tmp_path / "0", quiet=True)


def test_weights_without_hash_are_read(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "old.safetensors", {"notes": "{}"})
    assert read_tensors(tmp_path / "old.safetensors")[1] == {}
    write_tensors(tmp_path / "new.safetensors", {"a": torch.ones(2), "b": torch.tensor(True), "c": torch.zeros(0)}, {"x": 1})
    assert read_tensors(tmp_path / "new.safetensors")[1] == {"x": 1}


def test_modified_results_are_refused_and_skipped_by_the_report(config: RunConfig, tmp_path: Path) -> None:
    config = changed(config, epochs=1)
    for file in ("done", "metrics.jsonl"):
        folder = tmp_path / file
        best = train(config, folder, quiet=True)
        assert train(config, folder, quiet=True) == best and len(read_runs([folder])[0]) == 1
        text = (folder / file).read_text()
        (folder / file).write_text(text.replace('"test/recall(k=1)": 0.', '"test/recall(k=1)": 0.9'))
        with pytest.raises(UnimetricError, match=rf"{file}: was modified after the run"):
            train(config, folder, quiet=True)
        records, skipped = read_runs([folder])
        assert not records and skipped[0][1].startswith(f"{file}: was modified after the run")


def test_records_of_earlier_versions_are_read_and_modified_ones_are_not(tmp_path: Path) -> None:
    """Earlier versions have hashed the sorted content, with the checksums of the files at the end."""
    (tmp_path / "done").write_text("{}")
    write_record(tmp_path, {"packs": [], "train": {"names": ["größe.png"]}})
    seal_files(tmp_path, finished=True)
    record = read_record(tmp_path)
    assert record is not None and list(record) == ["files", "packs", "train"] and list(record["files"]) == ["done"]
    old = {"packs": [], "train": {"names": ["größe.png"]}, "files": record["files"]}
    checksum = hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()
    for text in ((tmp_path / RECORD).read_text(), json.dumps({"sha256": checksum, **old}, separators=(",", ":"))):
        (tmp_path / RECORD).write_text(text)
        assert read_record(tmp_path) == old
        check_files(tmp_path)
        (tmp_path / RECORD).write_text(text.replace("größe", "grösse").replace("gr\\u00f6\\u00dfe", "klein"))
        for read in (read_record, check_files):
            with pytest.raises(UnimetricError, match=r"data\.json: was modified"):
                read(tmp_path)


def test_read_images_returns_those_of_each_part(streamed: RunConfig, images: Path, tmp_path: Path) -> None:
    table, split = read_table(streamed)
    record_images(tmp_path, table, split)
    found = read_images(tmp_path)
    assert found == describe_images(table, split.parts) and found["train"]
    for file in images.rglob("*.png"):
        os.utime(file, (0, 0))
    now = describe_images(table, split.parts)["train"]
    assert now != found["train"] and [image.without_time for image in now] == [image.without_time for image in found["train"]]
    (tmp_path / RECORD).unlink()  # as in a folder of an earlier version
    assert read_images(tmp_path) == {}


# --- Bit flips --------------------------------------------------------------------------------------------------------------------


class Folders:
    """A finished and an interrupted run on images with a broken one and a split file, and what reading them gives.

    Args:
        config: Settings of the runs.
        place: Folder that contains `finished`, `interrupted` and the split file.
    """

    def __init__(self, config: RunConfig, place: Path) -> None:
        self.config, self.place = config, place
        self.display = Display(quiet=True)
        fabric = open_fabric(config)
        fabric.launch()
        self.state = build_training_state(config, fabric, self.display)

    def finished(self) -> Any:
        """Repeat the command, and evaluate."""
        folder = self.place / "finished"
        return train(self.config, folder, quiet=True), evaluate(folder)

    def interrupted(self) -> Any:
        """Everything with which the run would resume."""
        folder = self.place / "interrupted"
        check_same_run(self.config, folder)
        self.state.table, self.state.split = build_split(self.config)
        check_data(self.state, folder)
        progress = resume(self.state, folder)
        tensors = {f"{name}/{key}": value for name, part in self.state.parts.items() for key, value in part.state_dict().items()}
        moments = self.state.optimizer.state_dict()["state"]
        tensors |= {f"{index}/{key}": value for index, each in moments.items() for key, value in each.items()}
        return progress.notes(), hash_tensors(tensors).hex(), finished_lines(folder, progress.epoch)


def build_split(config: RunConfig) -> Any:
    from unimetric.runs.rows import read_table
    from unimetric.training.state import skip_unreadable

    table, split = read_table(config)
    return table, skip_unreadable(config, table, split, Display(quiet=True))[0]


@pytest.fixture(scope="module")
def folders(drawn: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    place = tmp_path_factory.mktemp("flips")
    images = Path(shutil.copytree(drawn, place / "images"))
    (images / "class00" / "broken.png").write_bytes(b"no image")
    write_split(place / "splits.json", images)
    config = load(
        dataset=f"folder(root='{images}')",
        split=f"ood(path='{place / 'splits.json'}')",
        transform="glyphs(size=32)",
        backbone="small(channels=8)",
        head="linear(dim=8)",
        batch_size=12,
        optimizer="adam(lr=1e-3)",
        epochs=2,
        logger="none",
        device="cpu",
        workers=0,
        on_bad_picture="skip",
    )
    train(config, place / "finished", quiet=True)
    interrupt(config, place / "interrupted")
    assert (place / "finished" / "skipped.txt").read_text().count("broken.png") == 1
    return Folders(config, place)


BOTH = ["config.toml", "metrics.jsonl", "checkpoint.safetensors", "model.safetensors", "environment.json", "skipped.txt", "data.json"]
FILES = {"finished": [*BOTH, "done"], "interrupted": BOTH, "": ["splits.json"]}


def test_bit_flips_are_refused_by_name_or_harmless(folders: Folders) -> None:
    rng = random.Random(0)
    clean = {name: getattr(folders, name)() for name in ("finished", "interrupted")}
    files = [(folders.place / run / name, run or "interrupted") for run, names in FILES.items() for name in names]
    kept = {path: path.read_bytes() for path, _ in files}
    outcomes: dict[str, list[str]] = {path.name: [] for path, _ in files}
    for number in range(208):  # 13 of each file
        path, reader = files[number % len(files)]
        flipped = bytearray(kept[path])
        bit = rng.randrange(8 * len(flipped))
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            found = getattr(folders, reader)()
        except UnimetricError as error:
            assert path.name in str(error) or str(path.parent) in str(error), (path, bit, error)
            outcomes[path.name].append("refused")
        else:
            assert found == clean[reader], f"bit {bit} of {path} changed the result"
            outcomes[path.name].append("harmless")
        path.write_bytes(kept[path])
    assert all(outcomes[name].count("refused") for name in outcomes if name not in ("environment.json", "skipped.txt")), outcomes
    # The finished run's checkpoint and the interrupted run's model are not read here.
    assert outcomes["model.safetensors"].count("refused") >= 12 and outcomes["checkpoint.safetensors"].count("refused") >= 12, outcomes
