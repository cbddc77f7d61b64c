"""The command line. Invalid input prints an error and a hint, exits with code 2 and writes nothing."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import struct
import subprocess
import sys
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.conftest import run_command as run
from typer.main import get_command

from unimetric.cli import app, main
from unimetric.cli.options import OLD_NAMES
from unimetric.images import QUALITY
from unimetric.images.packing import write


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Four classes of six small JPEGs."""
    rng = np.random.default_rng(0)
    for number in range(4):
        folder = tmp_path / "pictures" / f"class{number}"
        folder.mkdir(parents=True)
        for picture in range(6):
            noise = rng.integers(0, 256, (40, 48, 3), dtype=np.uint8) // 4 + 60 * number
            Image.fromarray(noise.astype(np.uint8)).save(folder / f"{picture}.jpg")
    return tmp_path / "pictures"


@pytest.fixture
def refused(capsys, monkeypatch, tmp_path):
    """Run a command that must fail well: exit code 2, the words given in its message, a hint, and no new file."""

    def check(*words: str, says: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        code, _, err = run(capsys, monkeypatch, *words)
        assert code == 2, err
        assert says in err
        assert "hint: " in err
        assert "Traceback" not in err
        assert sorted(tmp_path.rglob("*")) == before
        return err

    return check


def settings(pictures: Path, *more: str) -> list[str]:
    small = ["transform=base(size=32, resize=36)", "backbone=small(channels=16)", "head=linear(dim=8)", "batch_size=4", "epochs=1"]
    return [f"dataset=folder(root='{pictures}')", *small, "logger=none", "workers=0", "device=cpu", *more]


def test_train_rejects_unknown_key(refused, tmp_path: Path) -> None:
    assert "did you mean `epochs`?" in refused("train", "epoch=3", "--out", str(tmp_path / "run"), says="unknown key `epoch`")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "path=cub"], "unknown key `path`"),
        (["train", "out=runs/a"], "`--out` is an option"),
        (["evaluate", ".", "metrics=nmi"], "`--metrics` is an option"),
        (["evaluate", ".", "progress=1"], "unknown key `progress`"),
        (["adapt", ".", "seed=1"], "`--seed` is an option"),
        (["transfer", ".", "--to", "glyphs", "--set", "metrics=nmi"], "`--metrics` is an option"),
        (["shift", ".", "--set", "dataset=glyphs"], "`--dataset` is an option"),
        (["split", "glyphs", "--out", "splits.json", "seed=1"], "`--seed` is an option"),
        (["ensemble", ".", "metrics=nmi"], "`--metrics` is an option"),
        (["bench", "grid.toml", "path=a"], "unknown key `path`"),
        (["tune", "grid.toml", "trials=3"], "`--trials` is an option"),
        (["bench", "grid.toml", "parallel=2"], "`--parallel` is an option"),
        (["check", "data=1"], "`--data` is an option"),
        (["check", "epoch=3"], "unknown key `epoch`"),
        (["check", "grid.toml", "epoch=3"], "unknown key `epoch`"),
        (["train", "grid.toml/a.toml"], "grid.toml/a.toml: cannot be read"),
        (["bench", "grid.toml/a.toml"], "grid.toml/a.toml: cannot be read"),
    ],
)
def test_rejects_option_written_as_setting(refused, tmp_path: Path, monkeypatch, words: list[str], says: str) -> None:
    (tmp_path / "grid.toml").write_text("seed = [0, 1]")
    monkeypatch.chdir(tmp_path)
    refused(*words, says=says)


def test_train_rejects_unknown_argument(refused, tmp_path: Path) -> None:
    refused("train", "loss=margin(bata=1)", "--out", str(tmp_path / "run"), says="`margin` has no argument `bata`")


def test_train_rejects_miner_that_does_not_fit(refused, pictures: Path, tmp_path: Path) -> None:
    words = settings(pictures, "loss=circle", "miner=semihard")
    refused("train", *words, "--out", str(tmp_path / "run"), says="the loss Circle reads Pairs, but the miner Semihard gives Triplets")


def test_train_rejects_missing_folder(refused, tmp_path: Path) -> None:
    refused("train", *settings(tmp_path / "absent"), "--out", str(tmp_path / "run"), says="absent")


def test_train_rejects_missing_dataset(refused, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("UNIMETRIC_DATA", str(tmp_path))
    refused("train", "dataset=cub200", "--out", str(tmp_path / "run"), says="CUB_200_2011")


def test_train_rejects_class_with_one_image(refused, pictures: Path, tmp_path: Path) -> None:
    for picture in sorted((pictures / "class1").iterdir())[1:]:
        picture.unlink()
    refused("train", *settings(pictures), "--out", str(tmp_path / "run"), says="class1")


def bomb(path: Path) -> None:
    """A PNG of a few bytes that claims to be 60,000 pixels a side."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b""))


def spoil(pictures: Path, how: str) -> Path:
    victim = pictures / "class0" / "3.jpg"
    if how == "truncated":
        victim.write_bytes(victim.read_bytes()[: len(victim.read_bytes()) // 2])
    elif how == "text":
        victim.write_text("dear diary")
    elif how == "empty":
        victim.write_bytes(b"")
    else:
        bomb(victim)
    return victim


@pytest.mark.parametrize("how", ["truncated", "text", "empty", "bomb"])
def test_unreadable_image_is_rejected_or_skipped(refused, capsys, monkeypatch, pictures: Path, tmp_path: Path, how: str) -> None:
    victim = spoil(pictures, how)
    dataset = f"folder(root='{pictures}')"
    assert "--skip-bad" in refused("pack", dataset, "--out", str(tmp_path / "a.pack"), "--short-side", "32", says=str(victim))
    code, _, err = run(capsys, monkeypatch, "train", *settings(pictures), "--out", str(tmp_path / "stopped"))
    assert code == 2
    assert str(victim) in err
    assert not (tmp_path / "stopped" / "done").exists()

    code, out, _ = run(capsys, monkeypatch, "pack", dataset, "--out", str(tmp_path / "a.pack"), "--short-side", "32", "--skip-bad")
    assert code == 0
    assert "skipped" in out
    assert "23 images" in out
    code, out, err = run(capsys, monkeypatch, "train", *settings(pictures, "on_bad_picture=skip"), "--out", str(tmp_path / "run"))
    assert code == 0, err
    assert str(victim) in (tmp_path / "run" / "skipped.txt").read_text()


def test_evaluate_skips_unreadable_images(refused, capsys, monkeypatch, pictures: Path, tmp_path: Path) -> None:
    (pictures / "class3" / "3.jpg").write_bytes(b"")  # of a class that is tested on
    words = settings(pictures, "on_bad_picture=skip")
    assert run(capsys, monkeypatch, "train", *words, "--out", str(tmp_path / "run"))[0] == 0
    best = json.loads((tmp_path / "run" / "done").read_text())
    code, _, err = run(capsys, monkeypatch, "evaluate", str(tmp_path / "run"), "--out", str(tmp_path / "a.json"))
    assert code == 0, err
    assert json.loads((tmp_path / "a.json").read_text())["recall(k=1)"] == pytest.approx(best["test/recall(k=1)"])
    assert run(capsys, monkeypatch, "ensemble", str(tmp_path / "run"))[0] == 0
    for verb in ("evaluate", "ensemble"):  # before a picture is embedded, so that the run need not even be there
        refused(verb, str(tmp_path), "--metrics", "recal(k=1)", says="metrics: no `recal` in metrics")
    refused("evaluate", str(tmp_path / "run"), "head=linear(dim=4)", says="was trained with `head = 'linear(dim=8)'`")


def test_rerank_is_checked_before_embedding(refused, pictures: Path) -> None:
    next((pictures / "class3").iterdir()).write_bytes(b"")  # would stop whoever opens it
    words = ["evaluate", "small(channels=16)", *settings(pictures)[:2], "device=cpu", "workers=0", "--rerank"]
    said = refused(*words, says="the 20 nearest others of each image, but there are only 12 images")
    assert "evaluate at least 21 images, or remove `--rerank`" in said


def test_train_drops_classes_without_readable_images(refused, capsys, monkeypatch, pictures: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folders = sorted(pictures.iterdir())
    folders[0].rename(pictures / "a")  # three classes to train on, by their names
    for picture in (pictures / "a").iterdir():
        (pictures / "b").mkdir(exist_ok=True)
        (pictures / "b" / picture.name).write_bytes(b"")
    words = ["train", *settings(pictures, "on_bad_picture=skip", "loss=proxy_anchor"), "--out", str(tmp_path / "run")]
    assert run(capsys, monkeypatch, *words)[0] == 0
    assert len(load_file(tmp_path / "run" / "checkpoint.safetensors")["objective/loss.proxies"]) == 2
    for picture in folders[1].iterdir():
        picture.write_bytes(b"")
    refused(*words[:-1], str(tmp_path / "other"), says="two test classes must be left")


def test_pack_prints_progress_without_a_terminal(capsys, monkeypatch, pictures: Path, tmp_path: Path) -> None:
    words = ["pack", f"folder(root='{pictures}')", "--out", str(tmp_path / "a.pack")]
    assert run(capsys, monkeypatch, *words)[2] == ""  # done before the first line is due
    monkeypatch.setattr("unimetric.runs.display.EVERY", 0.0)
    code, out, err = run(capsys, monkeypatch, *words)
    assert code == 0
    assert "packing 1/24\n" in err
    assert re.search(r"^packing 23/24  [\d,.]+ per second  0 s left$", err, re.M)
    assert "packing" not in out


def test_pack_on_full_disk(refused, pictures: Path, tmp_path: Path, small_disk) -> None:
    with small_disk():
        refused("pack", f"folder(root='{pictures}')", "--out", str(tmp_path / "a.pack"), "--encoding", "raw", says="a.pack")


@pytest.mark.parametrize(
    ("mistake", "says"), [("optimizer=adam(lr=-1.0)", "optimizer: `lr` must be at least 0, got -1.0"), ("schedule=step(every=0)", "every")]
)
def test_errors_come_before_reading_images(refused, pictures: Path, tmp_path: Path, mistake: str, says: str) -> None:
    for picture in pictures.rglob("*.jpg"):
        picture.write_bytes(b"no picture")
    words = settings(pictures, "on_bad_picture=skip", mistake)
    refused("train", *words, "--out", str(tmp_path / "run"), says=says)


def test_too_little_memory_is_an_error_with_a_hint(refused, monkeypatch, pictures: Path, tmp_path: Path) -> None:
    import torch

    def too_large(*_: Any) -> None:
        torch.empty(1 << 59)

    def too_large_for_the_gpu(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB")

    words = ("train", *settings(pictures), "--out", str(tmp_path / "run"))
    monkeypatch.setattr("unimetric.training.loop.build_training_state", too_large)
    refused(*words, says="the memory is too small: ")
    monkeypatch.setattr("unimetric.training.loop.build_training_state", too_large_for_the_gpu)
    assert "GPU 0 has" not in refused(*words, says="the GPU is too small: CUDA out of memory. Tried to allocate 20.00 GiB\n")
    monkeypatch.setattr("unimetric.training.loop.build_training_state", lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        refused(*words, says="")


def test_train_rejects_unreadable_weights(refused, pictures: Path, tmp_path: Path) -> None:
    for name, content in (("a.safetensors", b"rubbish"), ("a.pth", b"rubbish"), ("b.pth", b"")):
        (tmp_path / name).write_bytes(content)
        words = settings(pictures, f"backbone=timm(name='test_resnet', weights='{tmp_path / name}')")
        refused("train", *words, "--out", str(tmp_path / "run"), says=f"{name}: unreadable weights")
    words = settings(pictures, "backbone=timm(name='test_resnet', weights='absent.pth')")
    refused("train", *words, "--out", str(tmp_path / "run"), says="absent.pth: no such weights file")


def test_train_rejects_weights_without_names(refused, pictures: Path, tmp_path: Path) -> None:
    import torch

    torch.save({0: torch.zeros(2)}, tmp_path / "numbers.pth")
    words = settings(pictures, f"backbone=timm(name='test_resnet', weights='{tmp_path / 'numbers.pth'}')")
    refused("train", *words, "--out", str(tmp_path / "run"), says="numbers.pth: must contain a table of tensors by name")


def test_train_rejects_weights_of_other_network(refused, pictures: Path, tmp_path: Path) -> None:
    import timm
    import torch

    torch.save(timm.create_model("test_vit").state_dict(), tmp_path / "vit.pth")
    words = settings(pictures, f"backbone=timm(name='test_resnet', weights='{tmp_path / 'vit.pth'}')")
    refused("train", *words, "--out", str(tmp_path / "run"), says="vit.pth: weights of another architecture")


def test_weights_file_executes_no_code(refused, pictures: Path, tmp_path: Path) -> None:
    import os
    import pickle

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Evil()))
    words = settings(pictures, f"backbone=timm(name='test_resnet', weights='{tmp_path / 'evil.pth'}')")
    refused("train", *words, "--out", str(tmp_path / "run"), says="unreadable weights: it does not hold plain tensors")
    assert not (tmp_path / "owned").exists()


def test_train_rejects_damaged_checkpoint(capsys, monkeypatch, pictures: Path, tmp_path: Path) -> None:
    words = ["train", *settings(pictures), "--out", str(tmp_path / "run")]
    assert run(capsys, monkeypatch, *words)[0] == 0
    (tmp_path / "run" / "done").unlink()
    file = tmp_path / "run" / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    code, _, err = run(capsys, monkeypatch, *words)
    assert code == 2
    assert "checkpoint.safetensors: unreadable checkpoint" in err


def test_pack_train_evaluate(capsys, monkeypatch, pictures: Path, tmp_path: Path) -> None:
    pack, folder = tmp_path / "mine.pack", tmp_path / "run"
    code, out, err = run(capsys, monkeypatch, "pack", f"folder(root='{pictures}')", "--out", str(pack), "--short-side", "36")
    assert code == 0 and "a shorter side of at most 36 pixels" in out + err
    words = settings(pictures, f"dataset=pack(path='{pack}')")[1:]
    code, out, err = run(capsys, monkeypatch, "train", *words, "--out", str(folder), "--quiet")
    assert code == 0, err
    assert "best epoch 1" in out
    npz, numbers = tmp_path / "a.npz", tmp_path / "a.json"
    metrics = ["--metrics", "recall(k=1); map_at_r; nmi"]
    code, out, err = run(capsys, monkeypatch, "evaluate", str(folder), *metrics, "--explain", "--save", str(npz), "--out", str(numbers))
    assert code == 0, err
    measured = json.loads(numbers.read_text())
    assert set(measured) == {"recall(k=1)", "map_at_r", "nmi"}
    code, out, err = run(capsys, monkeypatch, "evaluate", str(npz), *metrics, "--out", str(tmp_path / "b.json"))
    assert code == 0, err
    assert json.loads((tmp_path / "b.json").read_text()) == pytest.approx(measured)
    code, out, err = run(capsys, monkeypatch, "evaluate", "small", f"dataset=pack(path='{pack}')", "transform=base(size=32, resize=36)")
    assert code == 0, err
    assert "no dataset is given" not in out


def test_evaluate_rejects_invalid_targets(refused, tmp_path: Path, monkeypatch) -> None:
    refused("evaluate", str(tmp_path), says="not a run folder")
    refused("evaluate", "absent.npz", says="absent.npz: no such file")
    np.savez(tmp_path / "a.npz", embeddings=np.zeros((3, 2)))
    refused("evaluate", str(tmp_path / "a.npz"), says="must contain `labels`")
    np.savez(tmp_path / "b.npz", embeddings=np.zeros((3, 2)), labels=np.zeros(4))
    refused("evaluate", str(tmp_path / "b.npz"), says="3 embeddings but 4 labels")
    for nothing in ("no_such_backbone", "runs/no_such_run", "absent.index"):
        refused("evaluate", nothing, says=f"{nothing}: not a run folder, .npz file or backbone")
    monkeypatch.chdir(tmp_path)
    for file in ("images.pack", "numbers.json"):
        Path(file).write_text("{}")
        refused("evaluate", file, says=f"{file}: not a run folder, .npz file or backbone")


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "absent.npz", "--out"],
        ["evaluate", "small", "dataset=folder(root='absent')", "--save"],
        ["transfer", "absent", "--to", "glyphs", "--out"],
        ["ensemble", "absent", "--out"],
        ["calibrate", "absent", "--out"],
        ["shift", "absent", "--out"],
        ["figure", "embedding", "absent", "--out"],
        ["report", "absent", "--embed", "--out"],
        ["split", "absent", "--out"],
        ["split", "absent", "--out", "a.json", "--features"],
    ],
)
def test_outputs_are_checked_before_the_inputs(refused, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "a.json")
    err = refused(*words, out, says=f"{out}: cannot be written: Not a directory")
    assert "use another path, which you can write to" in err and "--out" not in err


def test_evaluate_file_with_geometry(refused, capsys, monkeypatch, tmp_path: Path) -> None:
    """By L2, both short vectors find each other; by cosine, every vector finds its class."""
    rows = np.array([[1.0, 0], [10, 0], [0, 1], [0, 10]])
    np.savez(tmp_path / "a.npz", embeddings=rows, labels=np.array([0, 0, 1, 1]))
    for words, value in (([], "1.0000"), (["geometry=cosine"], "1.0000"), (["geometry=euclidean"], "0.5000")):
        code, out, err = run(capsys, monkeypatch, "evaluate", str(tmp_path / "a.npz"), *words)
        assert code == 0 and value in out + err, err
    refused("evaluate", str(tmp_path / "a.npz"), "geometry=round", says="unknown geometry `round`")
    refused("evaluate", str(tmp_path / "a.npz"), "geometry=cosine", "seed=1", says="settings, `--save` and `--part` require a run folder")


def test_evaluate_rejects_invalid_files(refused, capsys, monkeypatch, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.npz", tmp_path / "bad.npz"
    rows, labels = np.random.default_rng(0).normal(size=(8, 2)), np.arange(8) // 2
    np.savez(good, embeddings=rows, labels=labels)
    whole = good.read_bytes()
    for content in (whole[: len(whole) // 2], b"", whole[:80] + bytes([whole[80] ^ 255]) + whole[81:]):  # cut, empty, altered
        bad.write_bytes(content)
        refused("evaluate", str(bad), says="bad.npz: must be an intact .npz file")
    with bad.open("wb") as file:
        np.save(file, rows)
    refused("evaluate", str(bad), says="bad.npz: must be an intact .npz file")
    for wrong in (rows.astype(complex), rows.astype(str), rows[:, :0]):
        np.savez(bad, embeddings=wrong, labels=labels)
        refused("evaluate", str(bad), says="bad.npz: `embeddings` must be")
    for scale in (1e-300, 1e300):
        np.savez(bad, embeddings=rows * scale, labels=labels)
        refused("evaluate", str(bad), says="bad.npz: `embeddings` must be in the range of float32, got ")
    for wrong in (np.array(["yes", "no"] * 4), np.arange(8)):
        np.savez(bad, embeddings=rows, labels=labels, query=wrong)
        refused("evaluate", str(bad), says="bad.npz: `query` must be bool")
    np.savez(bad, embeddings=rows, labels=np.array([0, 0, 1, 1, 2, 2, np.nan, np.nan]))
    refused("evaluate", str(bad), says="bad.npz: some `labels` are not a number")
    refused("evaluate", str(good), "--level", "95", says="`level` must be at least 0 and below 1, got 95")
    for words in (["seed=3"], ["--part", "train"], ["--save", str(tmp_path / "x.npz")]):
        refused("evaluate", str(good), *words, says="settings, `--save` and `--part` require a run folder")
    np.savez(bad, embeddings=rows.astype(">f8"), labels=labels)  # of another byte order, and into a folder that is made
    numbers = [tmp_path / "made" / f"{file.stem}.json" for file in (good, bad)]
    for file, out in zip((good, bad), numbers, strict=True):
        assert run(capsys, monkeypatch, "evaluate", str(file), "--out", str(out))[0] == 0
    assert numbers[0].read_text() == numbers[1].read_text()


def test_out_rejects_png(refused, tmp_path: Path) -> None:
    for verb, what in (("split", "glyphs"), ("shift", "a.npz")):
        refused(verb, what, "--out", str(tmp_path / "a.png"), says="`--out` must not be a .png file")


def test_check_reads_datasets_of_grid(refused, capsys, monkeypatch, pictures: Path, tmp_path: Path) -> None:
    grid = tmp_path / "grid.toml"
    grid.write_text(f"\ufeffdataset = [\"folder(root='{pictures}')\", \"folder(root='{tmp_path}/absent')\"]\n", encoding="utf-8")
    assert run(capsys, monkeypatch, "check", str(grid))[0] == 0
    refused("check", "--data", str(grid), says="absent` does not exist")


def test_train_rejects_invalid_settings(refused, monkeypatch, pictures: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("UNIMETRIC_TRUST", "math")
    for setting, says in (
        ("head=linear(dim=-5)", "head: `dim` must be at least 1, got -5"),
        ("optimizer=adam(lr=-1)", "optimizer: `lr` must be at least 0, got -1"),
        ("device=tpu", "cannot open the device"),
        ("loss=proxy_anchor miner=distance_weighted", "the loss `proxy_anchor` takes none"),
        ("schedule=step(every=0)", "schedule: `every` must be at least 1, got 0"),
        ("loss=math.pi", "`math.pi` is neither a class nor a function"),
        ("dataset=", "dataset: cannot read ``"),
        ("seed=99999999999999999999999", "`seed` must be finite and at most 64 bits long"),
        ("clip_norm=nan", "`clip_norm` must be"),
        (f"clip_norm=1{'0' * 400}", "`clip_norm` must be"),
    ):
        refused("train", *settings(pictures, *setting.split(" ")), "--out", str(tmp_path / "run"), says=says)
    still = settings(pictures, "head=identity", "loss=margin(learn_beta=False)", "warmup_epochs=1")
    refused("train", *still, "--out", str(tmp_path / "run"), says="anything to learn in `warmup_epochs = 1`")


def test_list_and_check(capsys, monkeypatch, refused, tmp_path: Path) -> None:
    code, out, _ = run(capsys, monkeypatch, "list", "losses")
    assert code == 0
    assert "multi_similarity" in out
    assert "needs them" in out
    refused("list", "loses", says="unknown component type `loses`")
    config = tmp_path / "a.toml"
    config.write_text('backbone = "small"\nloss = "circle"\nminer = "semihard"\n')
    assert "a.toml" in refused("check", str(config), says="reads Pairs")


def test_check_accepts_settings_without_a_file(refused, capsys, monkeypatch, tmp_path: Path) -> None:
    from unimetric.config import load

    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, monkeypatch, "check", "transform=glyphs", "loss=margin(beta=0.6)")
    assert (code, out) == (0, f"settings: good, run {load(transform='glyphs', loss='margin(beta=0.6)').run_id}\n"), err
    refused("check", "loss=circle", "miner=semihard", says="settings: the loss Circle reads Pairs")
    assert run(capsys, monkeypatch, "check", "objective=mixup", "backbone=timm(name='absent')")[0] == 0  # only a built one tells
    refused("check", "--build", "backbone=timm(name='absent')", says="settings: timm has no network `absent`")
    refused("check", "--data", "dataset=folder(root='absent')", says="absent` does not exist")
    for name, text, runs in (("a", "seed = 1", ""), ("b", "seed = [1, 2]\nepochs = [2, 3]", "2 runs"), ("c", SEARCH, "2 runs")):
        (tmp_path / f"{name}=1.toml").write_text(text)
        code, out, err = run(capsys, monkeypatch, "check", f"{name}=1.toml", "epochs=5")
        assert code == 0, err
        assert out == f"{name}=1.toml: good, {runs or f'run {load(seed=1, epochs=5).run_id}'}\n"
    assert "`unimetric configs` lists" in refused("check", "absent", says="absent: no such file")


SEARCH = 'loss = "margin(beta={beta})"\nepochs = 2\n[search]\nbeta = {low = 0.5, high = 1.0}\n'


def test_metrics_accept_semicolons_or_list(refused, capsys, monkeypatch, pictures: Path, tmp_path: Path) -> None:
    from unimetric.config import load

    semicolons, listed = "recall(k=1); map_at_r", '["recall(k=1)", "map_at_r"]'
    for number, text in enumerate((semicolons, listed)):
        folder = tmp_path / f"run{number}"
        code, _, err = run(capsys, monkeypatch, "train", *settings(pictures, f"metrics={text}"), "--out", str(folder), "--quiet")
        assert code == 0, err
        assert load(folder / "config.toml").metrics == ("recall(k=1)", "map_at_r")
        out = tmp_path / f"{number}.json"
        assert run(capsys, monkeypatch, "evaluate", str(folder), "--metrics", text.replace("map_at_r", "nmi"), "--out", str(out))[0] == 0
        assert set(json.loads(out.read_text())) == {"recall(k=1)", "nmi"}
    inside = "per_source(metric='recall(k=1)'); harmonic"
    assert load(metrics=inside).metrics == ("per_source(metric='recall(k=1)')", "harmonic")
    for bad in ("[recall(k=1), nmi]", "[1, 2]"):
        refused("evaluate", str(tmp_path / "run0"), "--metrics", bad, says=f"`--metrics` must be a list of spec strings, got `{bad}`")
    refused(
        "train", *settings(pictures, "metrics=[recall(k=1), nmi]"), "--out", str(tmp_path / "x"), says="`metrics` must be a list of spec"
    )
    refused("train", *settings(pictures, "metrics=recall(k=1); recal"), "--out", str(tmp_path / "x"), says="no `recal` in metrics")


COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_short_summary_and_example(capsys, monkeypatch, command: str) -> None:
    code, out, _ = run(capsys, monkeypatch, command, "--help")
    assert code == 0
    assert "Examples:" in out
    assert f"unimetric {command}" in out
    summary = COMMANDS[command].help.partition("\n\n")[0]
    assert summary.endswith(".") and "\n" not in summary and len(summary) < 80
    for parameter in COMMANDS[command].params:
        assert parameter.help and parameter.help[0] != " ", parameter.name


def test_help_groups_commands(capsys, monkeypatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "--help")
    groups = re.findall(r"─ (\w+) ─", out)
    assert code == 0
    assert groups == ["Options", "Train", "Measure", "Study", "Ship", "Data"]
    assert re.findall(r"^│ (\w+) ", out, re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize("module", ["unimetric", "unimetric.cli"])
def test_package_runs_as_a_module(module) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"unimetric {version('unimetric')}\n")


def test_split_checks_the_classes_before_it_computes_features(refused, tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{number}.png")
    outputs = ["--features", str(tmp_path / "features.npz"), "--out", str(tmp_path / "splits.json")]
    refused("split", f"folder(root='{tmp_path}')", "--backbone", "small", *outputs, says="three other test classes, got 2 and 2")


def test_hint_for_an_option_can_be_typed(refused) -> None:
    said = refused("split", "glyphs", "backbone=small(channels=8)", "--out", "a.json", says="`--backbone` is an option here")
    assert "write `--backbone 'small(channels=8)'`" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("adapt runs/a seed=3", "`seed=3`: `--seed` is an option here, not a setting\n\nhint: write `--seed 3`"),
        ("split glyphs --out a.json dataset=cub200", "`dataset=cub200`: `dataset` is an argument here, not a setting"),
        ("evaluate efficientnet_lite backbone=small", "`backbone = 'small'` would replace `efficientnet_lite`"),
        ("index efficientnet_lite . --out my.index backbone=small", "`backbone = 'small'` would replace `efficientnet_lite`"),
    ],
)
def test_setting_replaces_no_option_or_argument(refused, tmp_path: Path, monkeypatch, words: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    refused(*words.split(), says=says)


def test_version(capsys, monkeypatch) -> None:
    assert run(capsys, monkeypatch, "--version") == (0, f"unimetric {version('unimetric')}\n", "")


@pytest.mark.parametrize(
    ("words", "parameter", "value"),
    [
        ("adapt run --looks 3", "crops", 3),
        ("adapt run --looks=3", "crops", 3),
        ("adapt run --crops 3", "crops", 3),
        ("report runs --look", "embed", True),
        ("report runs --embed", "embed", True),
        ("bench grid --no-pictures", "images", False),
        ("bench grid --pictures", "images", True),
        ("bench grid --no-images", "images", False),
        ("ensemble runs --normalise", "normalize", True),
        ("ensemble runs --normalize", "normalize", True),
    ],
)
def test_old_option_names_keep_working(words: str, parameter: str, value: object) -> None:
    name, *rest = words.split()
    command = COMMANDS[name]
    assert command.make_context(name, rest).params[parameter] == value
    assert not OLD_NAMES.keys() & {option for each in command.params for option in (*each.opts, *each.secondary_opts)}


def test_old_option_names_are_kept_after_double_dash() -> None:
    assert COMMANDS["evaluate"].make_context("evaluate", ["--", "--look"]).params["target"] == "--look"


def test_file_urls_are_local_paths(capsys, monkeypatch, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/a%20b"
    words = ("train", *settings(pictures, "sampler=samples_per_class(n=2)"), f"--out=FILE://localhost{tmp_path}/a%20b/run")
    assert run(capsys, monkeypatch, *words)[0] == 0
    assert run(capsys, monkeypatch, "evaluate", f"{url}/run", "--out", f"{url}/found.json", "--save", f"{url}/e.npz")[0] == 0
    assert run(capsys, monkeypatch, "pack", f"folder(root='{pictures}')", "--out", f"{url}/my.pack")[0] == 0
    assert run(capsys, monkeypatch, "report", f"{url}/run", "--out", f"{url}/page.html")[0] == 0
    assert run(capsys, monkeypatch, "index", f"{url}/run", pictures.as_uri(), "--out", f"{url}/my.index", "device=cpu")[0] == 0
    image = (pictures / "class0" / "0.jpg").as_uri()
    assert "class0/0.jpg" in run(capsys, monkeypatch, "search", f"{url}/my.index", image, "-k", "1")[1]
    made = {"run", "found.json", "e.npz", "my.pack", "page.html", "my.index"}
    assert made <= {each.name for each in (tmp_path / "a b").iterdir()}
    assert not (tmp_path / "file:").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--out", "file://run"), "a `file://` URL must have an absolute path of this machine, got `file://run`"),
        (("--out=s3://bucket/a/run",), "`--out` must be a local path, got `s3://bucket/a/run`\n\nhint: use `--out run`"),
    ],
)
def test_out_rejects_other_urls(refused, pictures: Path, tmp_path: Path, monkeypatch, words: tuple[str, ...], says: str) -> None:
    monkeypatch.chdir(tmp_path)
    refused("train", *settings(pictures, "sampler=samples_per_class(n=2)"), *words, says=says)


def test_pack_quality_has_one_default() -> None:
    quality = next(each for each in COMMANDS["pack"].params if each.name == "quality")
    assert quality.default == QUALITY == inspect.signature(write).parameters["quality"].default


def test_ensemble_accepts_folders_with_equals_signs(refused, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=0.1").mkdir()
    refused("ensemble", "lr=0.1", says="lr=0.1: not a run folder")


def test_rejects_options_without_effect(refused, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text("seed = [0, 1]")
    for words in (["--gpus", "0.5"], ["--cpus", "2"]):
        refused("bench", str(tmp_path / "grid.toml"), *words, says="`--gpus` and `--cpus` require `--ray`")
    refused("bench", str(tmp_path / "grid.toml"), "--ray", "auto", "--parallel", "2", says="`--parallel` requires runs on this machine")
    refused("transfer", str(tmp_path), "--to", "glyphs", "--set", "dataset=cub200", says="`--to` sets the dataset")


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "all", ""])
def test_bench_rejects_invalid_parallel(refused, tmp_path: Path, text: str) -> None:
    (tmp_path / "grid.toml").write_text("seed = [0, 1]")
    refused("bench", str(tmp_path / "grid.toml"), f"--parallel={text}", says=f"`--parallel` must be `auto` or at least 1, got `{text}`")


def test_out_rejects_folder(refused, pictures: Path, tmp_path: Path, monkeypatch) -> None:
    np.savez(tmp_path / "a.npz", embeddings=np.eye(4), labels=np.arange(4) // 2)
    monkeypatch.chdir(tmp_path)
    refused("evaluate", "a.npz", "--out", ".", says=".: is a folder")
    refused("evaluate", "small", "--save", ".", says=".: is a folder")
    refused("pack", f"folder(root='{pictures}')", "--out", ".", says=".: is a folder")
    refused("calibrate", "run", "--out", ".", says=".: is a folder")
    refused("audit", "my.index", "--out", ".", says=".: is a folder")
    refused("export", "run", "--to", "onnx", "--out", ".", says=".: is a folder")


def test_file_names_may_not_be_utf8(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        (pictures / "class0").rename(os.fsdecode(bytes(pictures) + b"/caf\xe9"))
    except OSError:
        pytest.skip("this file system has no such names")
    (pictures / "caf\udce9" / "5.jpg").write_bytes(b"junk")
    words = ["train", *settings(pictures, "on_bad_picture=skip", "logger=none"), "--out", str(tmp_path / "run")]
    for more in (words, ["report", str(tmp_path / "run"), "--embed", "--out", str(tmp_path / "page.html")]):
        monkeypatch.setattr(sys, "argv", ["unimetric", *more])
        with monkeypatch.context() as streams, pytest.raises(SystemExit) as leaving:
            for name in ("stdout", "stderr"):
                streams.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict", write_through=True))
            main()
        assert not leaving.value.code
    assert b"caf\xe9/5.jpg" in (tmp_path / "run" / "skipped.txt").read_bytes()


def test_evaluate_rejects_other_model(refused, capsys, monkeypatch, pictures: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    assert run(capsys, monkeypatch, "train", *settings(pictures), "--out", folder)[0] == 0
    for verb in (["evaluate", folder], ["adapt", folder, "--shots", "2"], ["ensemble", folder]):
        refused(*verb, "head=linear(dim=3)", says="was trained with `head = ")
        file = "checkpoint" if verb[0] == "adapt" else "model"
        refused(*verb, "backbone=small(channels=8)", says=f"{file}.safetensors: weights of another model")
    assert run(capsys, monkeypatch, "adapt", folder, "--seed", str(2**64))[0] == 2


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("loss=margin(num_classes=1)", "`num_classes` must be 2 in this run, got 1"),  # this one ended the process
        ("loss=arcface(num_classes=1)", "`num_classes` must be 2 in this run, got 1"),
        ("loss=arcface(dim=3)", "`dim` must be 8 in this run, got 3"),
        ("head=linear(dim=8, features=3)", "`features` must be 16 in this run, got 3"),
    ],
)
def test_evaluate_rejects_other_size(refused, pictures: Path, tmp_path: Path, setting: str, says: str) -> None:
    refused("train", *settings(pictures, setting), "--out", str(tmp_path / "run"), says=says)


@pytest.mark.parametrize(
    ("words", "named", "hint"),
    [
        (["transfer", "NONE", "--to", "glyphs"], "NONE", "unimetric train --out"),
        (["interpolate", "NONE", "--alpha", "0.5", "--out", "OUT"], "NONE", "unimetric train --out"),
        (["figure", "keep", "NONE", "--out", "OUT.png"], "NONE", "unimetric train --out"),
        (["serve", "NONE", "--token-file", "NONE.txt"], "NONE.txt", "openssl rand -hex 32 > token.txt"),
        (["split", "glyphs(blocks='armenian')", "--features", "FOLDER", "--out", "OUT.json"], "FOLDER", "--features FILE.npz"),
        (
            ["figure", "bias", "NONE.npz", "--splits", "NONE.json", "--dataset", "glyphs", "--out", "OUT.png"],
            "NONE.npz",
            "--features FILE.npz",
        ),
    ],
)
def test_unreadable_inputs_are_named_with_a_fix(refused, tmp_path: Path, words: list[str], named: str, hint: str) -> None:
    (tmp_path / "FOLDER").mkdir()
    places = [re.sub("^(NONE|OUT|FOLDER)", rf"{tmp_path}/\1", word) for word in words]
    err = refused(*places, says=f"error: {tmp_path / named}: ")
    assert "Errno" not in err
    assert hint in err.partition("hint: ")[2]
