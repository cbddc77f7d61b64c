"""Several ranks on CPUs: the gradient of the whole batch for each kind of method, and what happens if a rank is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unimetric.config import RunConfig, from_settings, load
from unimetric.training.loop import train

VIT = {"backbone": "timm(name='test_vit', image_size=32)", "optimizer": "sgd(lr=1e-3)", "workers": 0}  # a large rate would amplify rounding

#: Settings of each kind of method. Some leave parameters of the model without a gradient.
KINDS: dict[str, dict[str, object]] = {
    "pair": {"loss": "contrastive"},
    "tuple": {"loss": "triplet", "miner": "random"},
    "proxy": {"loss": "proxy_anchor"},
    "memory": {"objective": "cross_batch(size=24, start=0)", "loss": "contrastive"},
    "crt": {"objective": "crt(high=0.0, consistency=0.0)", "head": "crt(dim=8)", "loss": "multi_similarity"},
    "s2sd": {"objective": "s2sd(dims=(12, 16), delay=0)"},
    "diva": {"objective": "diva(queue=4, temperature=0.5, rho=10.0)", "head": "diva(dim=8)"},
    "puma": {"adapter": "puma(rank=4)", "objective": "cross_batch(size=24, memory_only=True)", "loss": "margin"},
    "warm-up": {"warmup_epochs": 1},
    "cached": {"objective": "cached(chunk=2)", "loss": "multi_similarity"},
    "anchored": {"objective": "anchored(weights=0.1)", "loss": "multi_similarity"},
}


def settings(letters: Path, kind: str) -> RunConfig:
    small = {"transform": "glyphs(size=32)", "head": "linear(dim=8)", "batch_size": 12, "logger": "none", "device": "cpu"}
    return load(**{"dataset": f"pack(path='{letters}')"} | small | VIT | KINDS[kind])


@pytest.fixture(scope="module")
def by_ranks(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], dict[str, torch.Tensor]]:
    """Gradients of a kind with some number of ranks. One start of the processes serves all kinds."""
    folder = tmp_path_factory.mktemp("gradients")
    (folder / "kinds.json").write_text(json.dumps({kind: asdict(settings(letters, kind)) for kind in KINDS}))

    def read(ranks: int, kind: str) -> dict[str, torch.Tensor]:
        if not list(folder.glob(f"{ranks} *")):
            words = [sys.executable, str(Path(__file__).with_name("rank_gradients.py")), str(ranks), str(folder)]
            subprocess.run(words, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=600)
        return load_file(folder / f"{ranks} {kind}.safetensors")

    return read


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradient_is_that_of_the_whole_batch(by_ranks: Callable, ranks: int) -> None:
    for kind in KINDS:  # in one test, because parallel tests would start the processes twice
        one, several = by_ranks(1, kind), by_ranks(ranks, kind)
        assert several.keys() == one.keys(), kind  # what has no gradient on one rank has none on several
        whole = torch.stack([each.norm() for each in one.values()]).norm()  # tensors whose gradient nearly cancels have its rounding
        for name, expected in one.items():
            assert (several[name] - expected).norm() <= 1e-3 * expected.norm() + 1e-6 * whole, f"{kind}: {name}"


def changed(config: RunConfig, **others: object) -> RunConfig:
    return from_settings(asdict(config) | others)


def start(config: RunConfig, folder: Path, silence: str = "30") -> subprocess.Popen:
    toml = folder.with_suffix(".toml")
    toml.write_text(config.dump())
    words = [sys.executable, "-m", "unimetric.cli", "train", str(toml), "--out", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "UNIMETRIC_RANK_SILENCE": silence}
    return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment, start_new_session=True)


def children(process: int) -> list[int]:
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(word) for word in text.split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes of the ranks in /proc")
@pytest.mark.parametrize(
    ("number", "lost", "sentence"),
    [
        (signal.SIGKILL, 1, "rank 1 of 2 was killed or has crashed"),
        (signal.SIGKILL, 0, "rank 0 of 2 was killed or has crashed"),
        (signal.SIGSTOP, 1, "rank 1 of 2 has not responded for 8 seconds"),
    ],
)
def test_a_lost_rank_stops_the_others(config: RunConfig, tmp_path: Path, number: int, lost: int, sentence: str) -> None:
    """Then the same command resumes with one rank, and ends where the unbroken run does."""
    # A smooth loss: a random miner could draw another tuple after a difference in the last digit.
    config = changed(config, **VIT, loss="sup_con", epochs=12, evaluate_every=0, checkpoint_every=1)
    process = start(changed(config, device="cpu:2", strategy="ddp"), tmp_path / "run", silence="8")
    try:
        deadline = time.monotonic() + 200
        while not (tmp_path / "run" / "checkpoint.safetensors").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        (other,) = [child for child in children(process.pid) if b"unimetric.cli" in Path(f"/proc/{child}/cmdline").read_bytes()]
        os.kill(process.pid if lost == 0 else other, number)
        _, errors = process.communicate(timeout=60)  # all ranks hold the pipe, so it ends with the last of them
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert sentence in errors, errors
    assert "run the same command to resume" in errors
    assert not re.search("Traceback", errors)
    assert process.returncode == (-signal.SIGKILL if lost == 0 else 2)
    assert not (tmp_path / "run" / "done").exists()
    if lost:
        return
    train(config, tmp_path / "run", quiet=True)
    train(config, tmp_path / "unbroken", quiet=True)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("unbroken", "run"))
    assert all(torch.allclose(one[key], two[key], rtol=1e-2, atol=1e-3) for key in one)
