"""Progress lines where there is no terminal, and silence about the precision of float32 products."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from unimetric.config import load
from unimetric.runs import display
from unimetric.runs.display import Display, ProgressLines
from unimetric.training.loop import train


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    return now


def test_a_line_comes_every_thirty_seconds(clock: list[float], capsys: pytest.CaptureFixture) -> None:
    with Display() as shown:
        for done in range(1, 101):
            shown.step("packing", done, 100)
            clock[0] += 1.0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "packing 31/100  1.0 per second  69 s left",
        "packing 61/100  1.0 per second  39 s left",
        "packing 91/100  1.0 per second  9 s left",
    ]


def test_lines_of_slow_and_repeated_tasks(clock: list[float], capsys: pytest.CaptureFixture) -> None:
    lines = ProgressLines()
    for _ in range(2):  # the second time, the speed is that of the second time
        for done in range(1, 4):
            clock[0] += 3600.0
            lines.step("adapting", done, 10, "note")
    assert capsys.readouterr().err.splitlines() == [
        "adapting 1/10  note",
        "adapting 2/10  1.0 per hour  8.0 h left  note",
        "adapting 3/10  1.0 per hour  7.0 h left  note",
        "adapting 1/10  note",
        "adapting 2/10  1.0 per hour  8.0 h left  note",
        "adapting 3/10  1.0 per hour  7.0 h left  note",
    ]


def test_short_and_quiet_tasks_print_nothing(clock: list[float], capsys: pytest.CaptureFixture) -> None:
    for quiet in (False, True):
        with Display(quiet=quiet) as shown:
            for done in range(1, 5):
                shown.step("packing", done, 4)
                clock[0] += 5.0 + 100.0 * quiet
            assert not shown.due()
    assert capsys.readouterr() == ("", "")


def test_training_prints_lines_without_a_terminal(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "EVERY", 0.0)
    network = {"backbone": "small(channels=8)", "head": "linear(dim=8)", "optimizer": "adam(lr=1e-3)"}
    rest = {"epochs": 1, "batch_size": 16, "logger": "none", "device": "cpu", "workers": 0}
    train(load(dataset="glyphs(blocks='shapes')", transform="glyphs", **network, **rest), tmp_path / "run")
    out, err = capsys.readouterr()
    assert re.search(r"^training 2/\d+  [\d.,]+ per second  \d+ s left  loss \d", err, re.M)
    assert re.search(r"^epoch +1/1  loss .* images/s  \d+\.\d GiB  test/recall", out, re.M)
    assert not re.search(r"^training", out, re.M)


#: Forks, because the compiler takes seconds to load. The child imports Unimetric, the parent shows what would be printed without it.
HINTS = """
import os, sys, torch
from torch._inductor import compile_fx

child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("---", file=sys.stderr, flush=True)
else:
    import unimetric.runs.device
from lightning_fabric.accelerators import cuda

torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.get_device_name = lambda device=None: "H200"
cuda._check_cuda_matmul_precision(torch.device("cuda"))
compile_fx._warn_tf32_disabled()
print(torch.get_float32_matmul_precision())
"""


def test_hints_about_float32_precision_are_silent() -> None:
    from torch._inductor import compile_fx  # late, because it takes seconds

    quiet = "ignore:This process:DeprecationWarning"  # of Python 3.12 and later, about the fork
    found = subprocess.run([sys.executable, "-W", quiet, "-c", HINTS], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "highest\n" * 2), found.stderr
    silent, _, printed = found.stderr.partition("---\n")
    assert silent == ""
    # So that the test notices when the libraries change their hints.
    assert "Tensor Cores" in printed
    warned = "warnings.warn" in inspect.getsource(compile_fx._warn_tf32_disabled)  # torch 2.15 only logs it
    assert ("TensorFloat32 tensor cores" in printed) == warned
