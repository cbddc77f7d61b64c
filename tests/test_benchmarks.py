"""What the benchmarks put side by side computes the same. (Their times are never asserted.)"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
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
