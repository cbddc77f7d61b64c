"""Output that cannot be written, and signals: a run saves its work and says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

RUN = [sys.executable, "-m", "unimetric.cli"]
SMALL = [
    "dataset=glyphs(blocks='armenian')",
    "transform=glyphs",
    "backbone=small(channels=16)",
    "batch_size=32",
    "device=cpu",
    "logger=none",
]


@pytest.fixture
def embeddings(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "e.npz", embeddings=rng.normal(size=(40, 4)).astype(np.float32), labels=np.repeat(np.arange(8), 5))
    return tmp_path / "e.npz"


def test_train_goes_on_when_nobody_reads_its_output(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*RUN, "train", *SMALL, "epochs=3", "--out", str(tmp_path / "run")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    assert "training images" in process.stdout.readline()  # as in `| head -1`
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=300) == 0, errors
    assert "Traceback" not in errors and "BrokenPipe" not in errors
    assert (tmp_path / "run" / "done").exists()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
@pytest.mark.parametrize(
    "words", [["evaluate", "FILE"], ["list"], ["list", "losses"], ["check", "glyphs_margin"], ["configs", "show", "glyphs_margin"]]
)
def test_output_on_full_disk_is_an_error(words: list[str], embeddings: Path) -> None:
    with open("/dev/full", "w") as full:
        words = [str(embeddings) if word == "FILE" else word for word in words]
        done = subprocess.run([*RUN, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the output: cannot be written: No space left on device\n\nhint: ")


def test_first_interrupt_is_answered_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen([*RUN, "train", *SMALL, "epochs=500", "--out", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").stat().st_size:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    os.set_blocking(process.stderr.fileno(), False)
    said = b""
    while b"stopping at the next checkpoint" not in said and time.monotonic() - sent < 5:
        said += process.stderr.read() or b""
        time.sleep(0.02)
    assert b"stopping at the next checkpoint; press Ctrl-C again" in said
    assert process.wait(timeout=300) == 130
    assert (folder / "checkpoint.safetensors").exists()
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["epoch"] == 0


def test_interrupt_of_an_exec_has_the_exit_code(tmp_path: Path) -> None:
    """Python ends with SIGINT if Ctrl-C has left an `exec` of a string, as in the import of a module with dataclasses."""
    lines = [
        "import signal, sys",
        "from unimetric import cli",
        "signal.signal(signal.SIGINT, signal.default_int_handler)",  # a shell's background job ignores it
        "cli.app.registered_commands[0].callback = lambda: exec('signal.raise_signal(signal.SIGINT)', {'signal': signal})",
        "sys.argv = ['unimetric', cli.app.registered_commands[0].name]",
        "cli.main()",
    ]
    (tmp_path / "interrupted.py").write_text("\n".join(lines))
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "interrupted"], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
