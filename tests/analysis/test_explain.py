"""Heat maps: what is drawn is what the prototypes weigh."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from unimetric.analysis.explain import explain, heat
from unimetric.cli import main
from unimetric.config import RunConfig, from_settings
from unimetric.errors import UnimetricError
from unimetric.files import write_text
from unimetric.runs.model import build_model
from unimetric.runs.weights import write_tensors


def made(config: RunConfig, folder: Path, **settings: object) -> Path:
    """A run folder with weights as they start; no training is needed to look."""
    config = replace(from_settings(asdict(config) | settings), device="cpu")
    folder.mkdir()
    write_text(folder / "config.toml", config.dump())
    write_tensors(folder / "model.safetensors", build_model(config).state_dict(), {})
    return folder


@pytest.fixture
def run(config: RunConfig, tmp_path: Path) -> Path:
    return made(config, tmp_path / "run", head="crt(dim=8, hidden=16, prototypes=6, low_prototypes=3, shared=False)")


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        Image.fromarray(rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(tmp_path / f"{name}.png")
    return [tmp_path / "a.png", tmp_path / "b.png"]


def test_draws_the_most_active_prototypes_of_both_sets(run: Path, pictures: list[Path], tmp_path: Path) -> None:
    everything = explain(run, pictures, out=tmp_path / "all.png", count=100)
    assert sorted(number for number, _ in everything) == list(range(9))
    weights = [weight for _, weight in everything]
    assert weights == sorted(weights, reverse=True)
    assert explain(run, pictures, out=tmp_path / "few.png", count=3) == everything[:3]
    assert explain(run, pictures, out=tmp_path / "one.png", prototypes=[4]) == [(4, dict(everything)[4])]
    wide, narrow = (Image.open(tmp_path / name).size for name in ("all.png", "one.png"))
    assert wide[0] > 3 * narrow[0]  # ten columns and two
    assert len(np.unique(np.asarray(Image.open(tmp_path / "all.png").convert("RGB")).reshape(-1, 3), axis=0)) > 1000


def test_a_map_lies_where_its_positions_lie() -> None:
    maps = torch.zeros(1, 2, 16)
    maps[0, 1, 4 * 1 + 3] = 1  # second row, last column
    drawn = heat(maps, 32)
    assert drawn.shape == (1, 2, 32, 32)
    assert (drawn[0, 0] == 0).all()
    row, column = divmod(int(drawn[0, 1].argmax()), 32)
    assert 8 <= row < 16
    assert 24 <= column < 32
    with pytest.raises(UnimetricError, match="must have a square grid"):
        heat(torch.zeros(1, 1, 6), 8)


def test_a_vision_transformers_patches_are_a_map(config: RunConfig, pictures: list[Path], tmp_path: Path) -> None:
    backbone = "timm(name='vit_tiny_patch16_224', image_size=32)"
    run = made(config, tmp_path / "vit", backbone=backbone, head="crt(dim=8, hidden=16, prototypes=4)")
    assert len(explain(run, pictures[:1], out=tmp_path / "vit.png")) == 4


def test_the_verb(run: Path, pictures: list[Path], letters: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "maps.png"
    words = ["unimetric", "explain", str(run), str(pictures[0]), f"{letters}::3", "--out", str(out), "--prototypes", "0,5"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as leaving:
        main()
    assert not leaving.value.code
    said = capsys.readouterr().out
    assert "prototype 0 " in said
    assert "prototype 5 " in said
    assert out.is_file()


def test_says_what_is_wrong(run: Path, config: RunConfig, pictures: list[Path], tmp_path: Path) -> None:
    plain, out = made(config, tmp_path / "plain"), tmp_path / "maps.png"
    (tmp_path / "text.png").write_text("no picture")
    for wrong, words in (
        (dict(run=plain), 'head = "crt"'),
        (dict(run=tmp_path), "not a run folder"),
        (dict(prototypes=[9]), "between 0 and 8"),
        (dict(images=[]), "requires at least one image"),
        (dict(images=[tmp_path / "c.png"]), "no such image"),
        (dict(images=[tmp_path / "text.png"]), "text.png"),
        (dict(out=tmp_path / "maps.txt"), "must end in .png"),
        (dict(out=tmp_path / "nowhere" / "maps.png"), "does not exist"),
    ):
        with pytest.raises(UnimetricError) as error:
            explain(**{"run": run, "images": pictures, "out": out} | wrong)
        assert words in str(error.value)
    assert not out.exists()
