"""What the benchmarks put side by side computes the same. (Their times are never asserted.)"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("[!_]*.py")))
def test_every_script_tells_how_it_is_called(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert left.value.code == 0 and f"python benchmarks/{name}.py" in capsys.readouterr().out


def test_the_literal_forms_of_crt_are_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("benchmark_crt", FOLDER / "crt.py")
    assert spec and spec.loader
    crt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(crt)
    for key, value in {"BATCH": 3, "POSITIONS": 5, "CHANNELS": 8}.items():
        monkeypatch.setattr(crt, key, value)
    head, tokens = crt.head_and_tokens("cpu")
    head, tokens = head.double(), tokens.double()
    for form in crt.FORMS.values():
        torch.testing.assert_close(form(head).branches(tokens), head.branches(tokens))


def test_sharing_notices_a_wrong_block_of_a_transformer_without_pretrained_weights() -> None:
    sharing = importlib.import_module("sharing")
    network = timm.create_model("test_vit", init_values=1e-5, num_classes=0)
    sharing.count_all_blocks(network)
    images = torch.randn(2, 3, 160, 160)
    with torch.inference_mode():
        right = sharing.checksum(network.forward_features(images)).numpy()
        network.blocks[3].attn.register_forward_hook(lambda _part, _given, out: out.flip(1))
        found = sharing.checksum(network.forward_features(images)).numpy()
    assert sharing.wrong(right, found).tolist() == [0, 1]
    assert sharing.wrong(right, right).tolist() == []
    assert sharing.wrong(right, np.full_like(right, np.nan)).tolist() == [0, 1]


def test_machine_reports_processor_and_stolen_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = importlib.import_module("_machine")
    texts = {
        "/proc/cpuinfo": "model name\t: Some CPU\nflags\t\t: sse avx2 avx512_vnni\n",
        "/proc/stat": "cpu  100 0 50 800 0 0 0 50 0 0\ncpu0 1 2\n",
    }
    monkeypatch.setattr(machine, "Path", lambda path: type("Text", (), {"read_text": lambda self: texts[path]})())
    assert machine.processor() == "Some CPU; avx2 avx512_vnni"
    stolen = machine.Stolen()
    texts["/proc/stat"] = "cpu  150 0 50 820 0 0 0 80 0 0\n"
    assert "30.0 %" in str(stolen)


def test_clock_reports_best_and_median_turn(capsys: pytest.CaptureFixture[str]) -> None:
    clock = importlib.import_module("evaluation").Clock("cpu")
    for part in range(4):
        clock(lambda: sum(range(1000)), same_turn=part == 1)
    assert len(clock.walls) == len(clock.cpus) == 3
    clock.walls, clock.cpus = [3.0, 1.0, 2.5], [6.0, 2.0, 5.0]
    clock.line("name")
    assert "1.00 / 2.50 s" in (said := capsys.readouterr().out) and "cpu    2.00 / 5.00 s" in said
