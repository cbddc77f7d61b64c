"""Several ranks on CPUs: the gradient of the whole batch for each kind of method, and what happens if a rank is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Queue

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import changed

from unimetric.config import RunConfig, load
from unimetric.losses import ArcFace
from unimetric.runs.folder import lock_folder
from unimetric.training.loop import train
from unimetric.training.ranks import RankWatch

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
    "lora": {"adapter": "lora(rank=2, keep=0.5)", "loss": "contrastive"},
    "warm-up": {"warmup_epochs": 1},
    "cached": {"objective": "cached(chunk=2)", "loss": "multi_similarity"},
    "matryoshka": {"objective": "matryoshka(distillation=0.5)"},
    "anchored": {"objective": "anchored(weights=0.1)", "loss": "multi_similarity"},
    "sharded": {"loss": "arcface(sharded=True)", "clip_norm": 0.01},
    "resumed": {"loss": "arcface(sharded=True)", "optimizer": "adam(lr=1e-4)"},
}


def settings(letters: Path, kind: str) -> RunConfig:
    small = {"transform": "glyphs(size=32)", "head": "linear(dim=8)", "batch_size": 12, "logger": "none", "device": "cpu"}
    return load(**{"dataset": f"pack(path='{letters}')"} | small | VIT | KINDS[kind])


def test_gradient_is_that_of_the_whole_batch(letters: Path, tmp_path: Path) -> None:
    """In one test, because each start of the processes takes seconds. Two ranks come first: they write the checkpoint."""
    (tmp_path / "kinds.json").write_text(json.dumps({kind: asdict(settings(letters, kind)) for kind in KINDS}))
    words = [sys.executable, str(Path(__file__).with_name("rank_gradients.py")), str(tmp_path), "2", "1", "3"]
    subprocess.run(words, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=600)
    for ranks in (2, 3):
        for kind in KINDS:
            one, several = (load_file(tmp_path / f"{number} {kind}.safetensors") for number in (1, ranks))
            assert several.keys() == one.keys(), kind  # what has no gradient on one rank has none on several
            whole = torch.stack([each.norm() for each in one.values()]).norm()  # tensors whose gradient nearly cancels have its rounding
            for name, expected in one.items():
                most = 1e-5 if kind == "sharded" else 1e-3  # a norm of some rows would clip the gradient differently, but by little
                assert (several[name] - expected).norm() <= most * expected.norm() + 1e-6 * whole, f"{kind}: {name}"
        one, several = (load_file(tmp_path / f"{number} sharded losses.safetensors") for number in (1, ranks))
        assert several.keys() == one.keys() and len(one) == 18
        for name, expected in one.items():
            assert "negatives" in name or torch.allclose(several[name], expected, rtol=1e-9, atol=1e-12), name
        check_sample({name.split()[1]: value for name, value in several.items() if "negatives" in name}, ranks)
    # The checkpoint of two ranks holds the directions of all six classes, and their moments.
    stored = load_file(tmp_path / "resumed" / "checkpoint.safetensors")
    assert stored["objective/loss.proxies"].shape == (6, 8)
    assert sum(value.shape == (6, 8) for key, value in stored.items() if key.startswith("optimizer/")) == 2


def check_sample(found: dict[str, torch.Tensor], ranks: int) -> None:
    """The sampled loss of several ranks is that of a loss with only the sampled classes."""
    torch.manual_seed(0)
    full = ArcFace(num_classes=61, dim=6).double()
    embeddings, labels = torch.randn(8, 6, dtype=torch.float64).requires_grad_(), torch.tensor([0, 60, 25, 25, 31, 11, 40, 0])
    used = found["proxies"].abs().sum(1).nonzero()[:, 0]
    assert len(used) == {2: 15 + 16, 3: 10 + 10 + 11}[ranks] and set(labels.tolist()) <= set(used.tolist())
    full.proxies.data = full.proxies.data[used]
    value = full(embeddings, torch.searchsorted(used, labels))
    value.backward()
    for name, expected in {"loss": value, "embeddings": embeddings.grad, "proxies": full.proxies.grad}.items():
        given = found[name][used] if name == "proxies" else found[name]
        assert torch.allclose(given, expected.detach(), rtol=1e-9, atol=1e-12), name


def start(config: RunConfig, folder: Path, silence: str = "30") -> subprocess.Popen:
    toml = folder.with_suffix(".toml")
    toml.write_text(config.dump())
    words = [sys.executable, "-m", "unimetric.cli", "train", str(toml), "--out", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "UNIMETRIC_RANK_SILENCE": silence}
    return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment, start_new_session=True)


def wait_for_checkpoint(process: subprocess.Popen, folder: Path) -> None:
    deadline = time.monotonic() + 200
    while not (folder / "checkpoint.safetensors").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


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
    config = changed(config, **VIT, loss="arcface(sharded=True)", epochs=12, evaluate_every=0, checkpoint_every=1)
    process = start(changed(config, device="cpu:2", strategy="ddp"), tmp_path / "run", silence="8")
    try:
        wait_for_checkpoint(process, tmp_path / "run")
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


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes of the ranks in /proc")
@pytest.mark.parametrize("lost", [0, 1])
def test_rank_lost_at_the_start_stops_the_other(config: RunConfig, tmp_path: Path, lost: int) -> None:
    process = start(changed(config, **VIT, device="cpu:2", strategy="ddp"), tmp_path / "run")
    try:
        while not (others := children(process.pid)):
            assert process.poll() is None
            time.sleep(0.05)
        os.kill(others[0] if lost else process.pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=60)  # all ranks hold the pipe, so it ends with the last of them
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert f"rank {lost} of 2 was killed or has crashed" in errors
    assert process.returncode == (2 if lost else -signal.SIGKILL)


def test_error_of_one_rank_is_the_only_one(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with lock_folder(tmp_path / "run"):  # which only the first rank locks
        process = start(changed(config, device="cpu:2", strategy="ddp"), tmp_path / "run")
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 2 and "another process is training in it" in errors
    assert "rank 0 of 2 has ended with an error" in errors and "Traceback" not in errors


def test_error_of_all_ranks_is_printed_once(config: RunConfig, tmp_path: Path) -> None:
    process = start(changed(config, dataset="folder(root='nowhere')", device="cpu:2", strategy="ddp"), tmp_path / "run")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 2 and errors.count("the folder `nowhere` does not exist") == errors.count("error:") == 1


def test_only_the_first_rank_prints_that_a_run_is_saved(config: RunConfig, tmp_path: Path) -> None:
    config = changed(config, **VIT, loss="arcface", epochs=60, evaluate_every=0, device="cpu:2", strategy="ddp")
    process = start(config, tmp_path / "run")
    try:
        wait_for_checkpoint(process, tmp_path / "run")
        process.terminate()
        _, errors = process.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130 and errors.count("run the same command to resume") == 1


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(200)])
def test_first_rank_ignores_connections_that_are_no_rank(greeting: bytes) -> None:
    known: Queue[tuple[int, bytes, int, bytes]] = Queue()

    class Rank:
        world_size = 2

        def __init__(self, global_rank: int) -> None:
            self.global_rank = global_rank

        def broadcast(self, values: tuple[int, bytes, int, bytes]) -> tuple[int, bytes, int, bytes]:
            if self.global_rank == 0:
                known.put(values)
                return values
            found = known.get(timeout=20)
            with socket.create_connection(("127.0.0.1", found[0])) as stranger:  # before the second rank connects
                stranger.sendall(greeting)
            return found

    watches = [RankWatch(Rank(number)) for number in range(2)]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(watches[0]._connect)
        watches[1]._connect()
        first.result()
    assert [list(watch.peers) for watch in watches] == [[1], [0]]
    for watch in watches:
        watch.__exit__(None)
