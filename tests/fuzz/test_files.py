"""Damaged images, packs, embeddings, splits and run folders get a sentence."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.fuzz.conftest import Change, answer, byte_changes, cases, damage

from unimetric import load, train


def _image(form: str, mode: str) -> bytes:
    file = io.BytesIO()
    values = np.arange(24 * 20 * 3, dtype=np.uint8).reshape(24, 20, 3)
    Image.fromarray(values).convert(mode).save(file, form)
    return file.getvalue()


IMAGES = {
    f"{form}_{mode}": _image(form, mode)
    for form, mode in [("JPEG", "RGB"), ("PNG", "RGBA"), ("PNG", "P"), ("GIF", "P"), ("TIFF", "F"), ("BMP", "RGB"), ("WEBP", "RGB")]
}


@cases(50)
@given(kind=st.sampled_from(sorted(IMAGES)), changes=byte_changes)
def test_damaged_image(kind: str, changes: list[Change], tmp_path: Path) -> None:
    root = tmp_path / "images"
    shutil.rmtree(root, ignore_errors=True)
    for name in "ab":
        (root / name).mkdir(parents=True)
        for number in range(2):
            (root / name / f"{number}.png").write_bytes(IMAGES["PNG_RGBA"])
    (root / "a" / "x.png").write_bytes(damage(IMAGES[kind], changes))
    out = tmp_path / "images.pack"
    out.unlink(missing_ok=True)
    code, text = answer("pack", f"folder(root='{root}')", "--out", out, "--short-side", "16", "--workers", "1")
    assert code == 0 or ("x.png" in text and not out.exists()), text


@cases(60)
@given(changes=byte_changes)
def test_damaged_pack(changes: list[Change], letters_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.pack"
    path.write_bytes(damage(letters_file, changes))
    code, text = answer("pack", f"pack(path='{path}')", "--out", tmp_path / "again.pack", "--workers", "1")
    assert code == 0 or "damaged.pack" in text, text


@cases(50)
@given(changes=byte_changes)
def test_damaged_embeddings(changes: list[Change], tmp_path: Path) -> None:
    file = io.BytesIO()
    np.savez(file, embeddings=np.random.default_rng(0).normal(size=(12, 4)), labels=np.arange(12) // 3)
    path = tmp_path / "embeddings.npz"
    path.write_bytes(damage(file.getvalue(), changes))
    code, text = answer("evaluate", path)
    assert code == 0 or "embeddings.npz" in text, text


@cases(20)
@given(changes=byte_changes)
def test_damaged_split(changes: list[Change], letters: Path, tmp_path: Path) -> None:
    content = {"1": {"train": ["a"], "test": ["b"]}, "format": "unimetric splits 1", "splits": {"1": {"key": 0, "distance": 1.0}}}
    path = tmp_path / "splits.json"
    path.write_bytes(damage(json.dumps(content).encode(), changes))
    settings = [f"dataset=pack(path='{letters}')", f"split=ood(path='{path}', split=1)"]
    answer("check", "--data", *settings)


@pytest.fixture(scope="module")
def run(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    settings = {"transform": "glyphs(size=32)", "backbone": "small(channels=8)", "head": "linear(dim=8)", "batch_size": 12, "epochs": 1}
    train(load(dataset=f"pack(path='{letters}')", logger="none", device="cpu", **settings), folder, quiet=True)
    return folder


@cases(40)
@given(number=st.integers(0, 99), command=st.sampled_from(["evaluate", "report", "train", "export"]), changes=byte_changes)
def test_damaged_run_folder(number: int, command: str, changes: list[Change], run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run, folder)
    files = sorted(path.name for path in run.iterdir() if path.is_file())
    file = files[number % len(files)]
    (folder / file).write_bytes(damage((run / file).read_bytes(), changes))
    if command == "train":
        (folder / "done").unlink(missing_ok=True)
        answer("train", folder / "config.toml", "--out", folder, "--quiet")
    elif command == "report":
        answer("report", folder, "--out", tmp_path / "report.html")
    elif command == "export":
        shutil.rmtree(tmp_path / "export", ignore_errors=True)
        answer("export", folder, "--out", tmp_path / "export")
    else:
        answer("evaluate", folder)
