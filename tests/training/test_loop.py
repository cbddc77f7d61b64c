"""Runs: that they learn, that they go on, that they stop well."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from safetensors.torch import load_file
from tests.conftest import changed, interrupt, read_log

from unimetric.analysis.evaluate import evaluate
from unimetric.config import RunConfig
from unimetric.errors import Interrupted, UnimetricError
from unimetric.images.loading import Resident, Streamed
from unimetric.runs.device import CSVLogger, open_fabric
from unimetric.runs.display import Display
from unimetric.runs.weights import read_tensors
from unimetric.samplers.samples_per_class import SamplesPerClass
from unimetric.spec import trusting
from unimetric.training.log import Log, open_logger
from unimetric.training.loop import train
from unimetric.training.state import build_training_state


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint.safetensors")


def same(a: Path, b: Path) -> bool:
    first, second = tensors(a), tensors(b)
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def command(config: RunConfig, folder: Path, *, start_new_session: bool = False) -> subprocess.Popen:
    settings = folder.with_suffix(".toml")
    settings.write_text(config.dump())
    return subprocess.Popen(
        [sys.executable, "-m", "unimetric.cli", "train", str(settings), "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=start_new_session,
    )


def test_config_must_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(UnimetricError, match="settings of a run, got 'laptop'") as caught:
        train("laptop", tmp_path / "run")  # type: ignore[arg-type]
    assert "unimetric.load" in caught.value.hint and not list(tmp_path.iterdir())


def test_loss_of_zero_in_the_first_epoch_gives_a_warning(config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train(changed(config, epochs=1), tmp_path / "pairs")
    assert "the loss of every batch is 0" not in capsys.readouterr().out
    train(changed(config, epochs=2, batch_size=6, loss="multi_similarity", sampler="samples_per_class(n=1)"), tmp_path / "single")
    assert capsys.readouterr().out.count("the loss of every batch is 0") == 1


def test_a_run_leaves_what_it_should(config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    best = train(config, tmp_path / "run", quiet=True)
    folder = tmp_path / "run"
    assert {"config.toml", "metrics.jsonl", "checkpoint.safetensors", "model.safetensors", "environment.json", "done"} <= {
        file.name for file in folder.iterdir()
    }
    assert [line["epoch"] for line in read_log(folder)] == [0, 1, 2, 3]
    assert best["test/recall(k=1)"] == max(line["test/recall(k=1)"] for line in read_log(folder))
    assert not [file for file in folder.iterdir() if file.name.startswith(".")]
    assert train(config, folder, quiet=True) == best and not capsys.readouterr().out  # a finished run is not done again
    assert train(config, folder) == best and "this run is finished" in capsys.readouterr().out
    measured = evaluate(folder)
    assert measured["recall(k=1)"] == pytest.approx(best["test/recall(k=1)"])


def test_the_same_settings_give_the_same_weights(config: RunConfig, tmp_path: Path) -> None:
    train(config, tmp_path / "a", quiet=True)
    train(config, tmp_path / "b", quiet=True)
    assert same(tmp_path / "a", tmp_path / "b")
    train(changed(config, seed=1), tmp_path / "c", quiet=True)
    assert not same(tmp_path / "a", tmp_path / "c")


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_products_in_bfloat16_change_no_later_run(config: RunConfig, tmp_path: Path) -> None:
    """On an ARM CPU without bfloat16, PyTorch disables the kernels of oneDNN for the whole process after such a product."""
    train(config, tmp_path / "a", quiet=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.nn.Linear(192, 64)(torch.ones(8, 20, 192))
    train(config, tmp_path / "b", quiet=True)
    assert same(tmp_path / "a", tmp_path / "b")


KILLED = """
import os, signal, sys
from unimetric.config import load
from unimetric.training.log import Log
from unimetric.training.loop import train
from unimetric.spec import find, parse

config, folder, epoch, step = load(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
sampler = find("samplers", parse(config.sampler).name)
draw = sampler.batch

def batch(self, number):
    if (self.epoch, number) == (epoch, step):
        os.kill(os.getpid(), signal.SIGKILL)
    return draw(self, number)

sampler.batch = batch
train(config, folder, quiet=True)
"""


@pytest.mark.parametrize("sampler", ["samples_per_class(n=2)", "distance_matching(big_batch=24, candidates=3)"])
def test_a_run_killed_at_a_random_step_ends_as_the_unbroken_one(config: RunConfig, tmp_path: Path, sampler: str) -> None:
    config = changed(config, epochs=6, checkpoint_every=2, sampler=sampler)
    train(config, tmp_path / "unbroken", quiet=True)
    (tmp_path / "settings.toml").write_text(config.dump())
    epoch, step = random.randrange(6), random.randrange(5)
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "settings.toml"), str(tmp_path / "broken"), str(epoch), str(step)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert not (tmp_path / "broken" / "done").exists()
    train(config, tmp_path / "broken", quiet=True)
    assert same(tmp_path / "unbroken", tmp_path / "broken"), f"killed in epoch {epoch} at step {step}"
    drop = ("seconds", "pictures_per_second", "peak_memory_gib")
    assert [{k: v for k, v in line.items() if k not in drop} for line in read_log(tmp_path / "unbroken")] == [
        {k: v for k, v in line.items() if k not in drop} for line in read_log(tmp_path / "broken")
    ]


@pytest.mark.parametrize("residence", ["host", "stream"])
def test_a_run_stopped_in_the_middle_of_an_epoch_goes_on_exactly(config: RunConfig, tmp_path: Path, monkeypatch, residence: str) -> None:
    """The moment is chosen by the test, so that it lies inside an epoch for certain. The adapter draws from torch's own dice."""
    network = {"backbone": "timm(name='test_vit', image_size=32)", "adapter": "stochastic_adapter(rank=4)"}
    config = changed(config, residence=residence, workers=0, epochs=2, **network)
    train(config, tmp_path / "unbroken", quiet=True)
    original = SamplesPerClass.batch

    def ask(self, step: int) -> np.ndarray:
        if self.epoch == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, step)

    monkeypatch.setattr(SamplesPerClass, "batch", ask)
    with pytest.raises(Interrupted, match="epoch 2 after step 3"):
        train(config, tmp_path / "broken", quiet=True)
    monkeypatch.undo()
    train(config, tmp_path / "broken", quiet=True)
    assert same(tmp_path / "unbroken", tmp_path / "broken")


def test_a_run_in_half_precision_goes_on_with_its_scale(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fabric gives `16-mixed` to no CPU by its name, but by its plugin; the scale begins so high that the first steps are skipped."""

    def half(config: RunConfig, **_: object) -> Fabric:
        return Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 2.0**40)))

    monkeypatch.setattr("unimetric.training.loop.open_fabric", half)
    config = changed(config, epochs=6)
    train(config, tmp_path / "unbroken", quiet=True)
    original = SamplesPerClass.batch

    def ask(self: SamplesPerClass, step: int) -> np.ndarray:
        if self.epoch == 4 and step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, step)

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(SamplesPerClass, "batch", ask)
        train(config, tmp_path / "broken", quiet=True)
    train(config, tmp_path / "broken", quiet=True)
    assert same(tmp_path / "unbroken", tmp_path / "broken")
    scales = [read_tensors(tmp_path / run / "checkpoint.safetensors")[1]["scale"] for run in ("unbroken", "broken")]
    assert scales[0] == scales[1]
    assert scales[0]["scale"] < 2.0**40


def diverge(config: RunConfig, folder: Path) -> None:
    """Train with a schedule from outside that raises the rate to infinity in the second epoch."""
    (folder.parent / "runaway.py").write_text("def runaway(progress, epochs):\n    return 1.0 if progress < 1 else 1e38\n")
    with pytest.MonkeyPatch.context() as patch, trusting("runaway"), pytest.raises(UnimetricError, match="not finite"):
        patch.syspath_prepend(str(folder.parent))
        train(changed(config, schedule="runaway.runaway", loss="n_pair"), folder, quiet=True)


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(config: RunConfig, tmp_path: Path) -> None:
    diverge(config, tmp_path / "run")
    assert all(torch.isfinite(value).all() for value in tensors(tmp_path / "run").values() if value.is_floating_point())
    assert not (tmp_path / "run" / "done").exists()


def test_files_and_packs_show_the_same_pictures(config: RunConfig, tmp_path: Path) -> None:
    train(changed(config, epochs=1), tmp_path / "memory", quiet=True)
    train(changed(config, epochs=1, residence="stream", workers=1), tmp_path / "stream", quiet=True)
    a, b = read_log(tmp_path / "memory"), read_log(tmp_path / "stream")
    assert a[0]["test/recall(k=1)"] == pytest.approx(b[0]["test/recall(k=1)"], abs=0.05)
    assert a[1]["loss"] == pytest.approx(b[1]["loss"], rel=0.05)  # bytes are rounded in the workers


def test_packed_pictures_are_read_where_the_system_does_not_say_what_is_free(config: RunConfig, tmp_path: Path, monkeypatch) -> None:
    """As on macOS."""
    known = os.sysconf

    def sysconf(name: str) -> int:
        if name == "SC_AVPHYS_PAGES":
            raise ValueError("unrecognized configuration name")
        return known(name)

    monkeypatch.setattr(os, "sysconf", sysconf)
    train(changed(config, epochs=1), tmp_path / "run", quiet=True)


def test_settings_of_another_run_are_refused(config: RunConfig, tmp_path: Path) -> None:
    train(changed(config, epochs=1), tmp_path / "run", quiet=True)
    with pytest.raises(UnimetricError, match="contains another run"):
        train(changed(config, epochs=1, seed=5), tmp_path / "run", quiet=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(UnimetricError, match="not a run folder"):
        train(config, tmp_path / "other", quiet=True)


def test_the_setting_that_differs_is_named(config: RunConfig, tmp_path: Path) -> None:
    train(changed(config, epochs=1), tmp_path / "run", quiet=True)
    with pytest.raises(UnimetricError, match=r"\(clip_norm = 0\.0, not 1\.0\)"):  # and not the device, which may differ
        train(changed(config, epochs=1, device="auto", clip_norm=1.0), tmp_path / "run", quiet=True)


def test_a_run_killed_before_its_settings_were_written_begins_anew(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in (".lock", ".config.toml.17"):
        (tmp_path / "run" / name).touch()
    train(changed(config, epochs=1), tmp_path / "run", quiet=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".hidden").touch()
    with pytest.raises(UnimetricError, match="not a run folder"):
        train(config, tmp_path / "other", quiet=True)


def test_two_runs_do_not_share_a_folder(config: RunConfig, tmp_path: Path) -> None:
    hold = (
        "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.lockf(file, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(config.dump())
    words = [sys.executable, "-c", hold, str(tmp_path / "run" / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UnimetricError, match="another process is training in it"):
            train(config, tmp_path / "run", quiet=True)
        other.kill()
    train(changed(config, epochs=3), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_run_folder_that_was_spoilt(config: RunConfig, tmp_path: Path) -> None:
    config = changed(config, epochs=1, loss="arcface", miner="")
    folder = tmp_path / "run"
    best = train(config, folder, quiet=True)
    for content in ("[]", "{}", '{"epoch": 1}', '{"epoch": 1, "chosen_on": "test", "test/recall(k=1)": null}'):
        (folder / "done").write_text(content)
        with pytest.raises(UnimetricError, match="done: not the line of a best epoch"):
            train(config, folder, quiet=True)
    (folder / "done").write_text("{")
    with pytest.raises(UnimetricError, match="done: unreadable"):
        train(config, folder, quiet=True)
    (folder / "done").unlink()
    kept = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(kept + b'\xff\xfe\n[1]\n{"epoch": "x"}\n')
    assert train(config, folder, quiet=True) == best
    assert (folder / "metrics.jsonl").read_bytes() == kept
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:99])
    with pytest.raises(UnimetricError, match="unreadable checkpoint") as spoilt:
        evaluate(folder)
    assert "train the run again in a new folder" in spoilt.value.hint  # in this one it is done
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnimetricError, match="the weights are missing"):
        evaluate(folder)
    (folder / "done").unlink()
    (folder / "data.json").unlink()  # it would name the images that have changed
    fewer = changed(config, split="standard(validation=0.34)")
    (folder / "config.toml").write_text(fewer.dump())
    with pytest.raises(UnimetricError, match=r"checkpoint\.safetensors: does not fit the run any more: .*size mismatch"):
        train(fewer, folder, quiet=True)


def test_metric_without_unknown_queries_fails_before_training(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(UnimetricError, match=r"`auroc`: .* whose class is not in the gallery"):
        train(changed(config, metrics=("recall(k=1)", "auroc"), evaluate_every=0), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_batch_that_ranks_cannot_share_is_refused_before_any_picture_is_read(config: RunConfig) -> None:
    ranks = SimpleNamespace(global_rank=0, world_size=2, device=torch.device("cpu"))
    config = changed(config, batch_size=9, sampler="samples_per_class(n=3)")
    with pytest.raises(UnimetricError, match=r"multiple of the number of ranks \(2\), got batch_size=9"):
        build_training_state(config, ranks, Display(quiet=True))  # type: ignore[arg-type]


def test_a_gradient_that_is_no_number_is_a_sentence_when_clipped(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(UnimetricError, match=r"not finite|NaN"):
        train(changed(config, clip_norm=1.0, optimizer="adam(lr=1e30)"), tmp_path / "run", quiet=True)


def test_validation_classes_choose_the_epoch(config: RunConfig, tmp_path: Path) -> None:
    best = train(changed(config, split="standard(validation=0.34)"), tmp_path / "run", quiet=True)
    assert best["chosen_on"] == "validation"
    assert best["validation/recall(k=1)"] == max(line["validation/recall(k=1)"] for line in read_log(tmp_path / "run"))


MEASURES = """
from unimetric.metrics import spectral_decay

def more(space): return spectral_decay(space)
def less(space): return spectral_decay(space)

less.better = "lower"
"""


def test_best_epoch_is_that_of_the_saved_weights_after_a_kill(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated epoch may differ by rounding, so that the epoch of the weights does not return."""
    config = changed(config, epochs=4, checkpoint_every=2)
    values = iter([2.0, 3.0, 4.0, 2.5, 2.6])
    monkeypatch.setattr("unimetric.training.loop.evaluate_splits", lambda state: {"test/recall(k=1)": next(values)})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        write = Log.write

        def interrupt(self: Log, line: dict) -> None:
            if line["epoch"] == 3:
                raise KeyboardInterrupt
            write(self, line)

        patch.setattr(Log, "write", interrupt)
        train(config, tmp_path / "run", quiet=True)
    best = train(config, tmp_path / "run", quiet=True)
    assert read_tensors(tmp_path / "run" / "model.safetensors")[1]["metrics"]["epoch"] == best["epoch"] == 4


@pytest.mark.parametrize("left", [None, 99])
def test_a_resumed_run_needs_the_weights_of_its_best_epoch(config: RunConfig, tmp_path: Path, left: int | None) -> None:
    """No later epoch is better, so the run would finish without weights."""
    config = changed(config, epochs=2, optimizer="adam(lr=0.0)")
    interrupt(config, tmp_path)
    weights = tmp_path / "model.safetensors"
    kept = weights.read_bytes()
    weights.unlink() if left is None else weights.write_bytes(kept[:left])
    with pytest.raises(UnimetricError, match=r"model\.safetensors: the weights of the best epoch cannot be read"):
        train(config, tmp_path, quiet=True)
    weights.write_bytes(kept)
    assert train(config, tmp_path, quiet=True)["epoch"] == 0


def test_an_optimizer_class_from_outside(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def descend(groups, *, rate):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with trusting("torch", "mine"):
        train(changed(config, epochs=1, optimizer="torch.optim.Adagrad(lr=0.02, eps=1e-6)"), tmp_path / "run", quiet=True)
        with pytest.raises(UnimetricError, match="has no argument `lr`"):
            train(changed(config, optimizer="mine.descend(rate=0.1)"), tmp_path / "second", quiet=True)
    notes = read_tensors(tmp_path / "run" / "checkpoint.safetensors")[1]
    assert "eps" in json.dumps(notes) and "0.02" in json.dumps(notes)


def test_metrics_choose_the_epoch_each_in_its_own_direction(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "measures.py").write_text(MEASURES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("UNIMETRIC_TRUST", "measures")
    best = {}
    for chosen, metrics in {
        "more": ("recall(k=1)", "measures.more"),
        "less": ("recall(k=1)", "measures.less"),
        "alone": ("measures.less",),
    }.items():
        settings = changed(config, metrics=metrics, chosen_by=len(metrics), epochs=4)
        best[chosen] = train(settings, tmp_path / chosen, quiet=True)
    found = read_log(tmp_path / "more")
    decay = {line["epoch"]: line["test/measures.more"] for line in found}
    recall = {line["epoch"]: line["test/recall(k=1)"] for line in found}
    assert best["more"]["epoch"] == max(decay, key=lambda epoch: recall[epoch] + decay[epoch])
    assert best["less"]["epoch"] == max(decay, key=lambda epoch: recall[epoch] - decay[epoch])
    assert best["alone"]["epoch"] == min(decay, key=decay.__getitem__)
    assert len({best["more"]["epoch"], best["alone"]["epoch"]}) == 2
    assert evaluate(tmp_path / "alone") == pytest.approx(
        {"measures.less": min(decay.values())}
    )  # the weights, too, are those of that epoch
    assert best["alone"]["lower_is_better"] == ["measures.less"] and "lower_is_better" not in best["more"]


def test_groups_learn_at_their_own_rate(config: RunConfig) -> None:
    from unimetric.runs.model import build_model
    from unimetric.training.build import build_objective, build_optimizer

    config = changed(config, head_lr_scale=10.0, loss="arcface(lr=0.5)", miner="")
    model = build_model(config)
    objective = build_objective(config, model, num_classes=6)
    groups = {group["name"]: group for group in build_optimizer(config, model, objective).param_groups}
    assert groups["backbone"]["lr"] == pytest.approx(1e-3)
    assert groups["head"]["lr"] == pytest.approx(1e-2)
    assert groups["loss"]["lr"] == 0.5
    assert groups["loss"]["weight_decay"] == 0
    assert groups["backbone"]["weight_decay"] == 4e-4


def test_parts_with_the_same_options_share_a_group(config: RunConfig) -> None:
    from unimetric.runs.model import build_model
    from unimetric.training.build import build_objective, build_optimizer

    config = changed(config, objective="s2sd(dims=(8, 16))", loss="margin")
    model = build_model(config)
    objective = build_objective(config, model, num_classes=6)
    groups = {group["name"]: group for group in build_optimizer(config, model, objective).param_groups}
    assert list(groups) == ["backbone", "head", "loss", "targets.0.0"]
    assert {id(parameter) for parameter in groups["loss"]["params"]} == {id(loss.beta) for loss in (objective.loss, *objective.losses)}
    assert len(groups["targets.0.0"]["params"]) == len(list(objective.targets.parameters()))


def test_warm_up_leaves_the_backbone_alone(config: RunConfig, tmp_path: Path) -> None:
    train(changed(config, epochs=1), tmp_path / "free", quiet=True)
    train(changed(config, epochs=1, warmup_epochs=1), tmp_path / "warm", quiet=True)
    from unimetric.runs.model import build_model

    start = build_model(config).state_dict()["backbone.layers.0.weight"]
    assert torch.equal(tensors(tmp_path / "warm")["model/backbone.layers.0.weight"], start)
    assert not torch.equal(tensors(tmp_path / "free")["model/backbone.layers.0.weight"], start)


@pytest.mark.parametrize("residence", ["host", "stream"])
@pytest.mark.parametrize(("shots", "sampler"), [(1, "samples_per_class(n=2)"), (1, "shuffle"), (40, "shuffle")])
def test_a_picture_that_comes_again_is_looked_at_anew(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, residence: str, shots: int, sampler: str
) -> None:
    """A class with too few pictures for its shots, or for a batch, has some of them again: other crops of them, as any loader gives."""
    seen: list[tuple[int, bytes]] = []
    for kind in (Resident, Streamed):

        def spied(self: Any, requests: Any, load: Any = kind.load) -> Any:
            kept: list = []
            for images in load(self, (kept.append(request) or request for request in requests)):
                rows, look = kept.pop(0)
                if look.epoch is not None:
                    seen.extend((int(row), image.numpy().tobytes()) for row, image in zip(rows, images, strict=True))
                yield images

        monkeypatch.setattr(kind, "load", spied)
    config = changed(config, epochs=1, evaluate_every=0, split=f"few_shot(shots={shots})", sampler=sampler, residence=residence, workers=0)
    config = changed(config, transform="adv(size=32, resize=32, grayscale=0.0)")  # of a small letter two boxes may be alike
    train(config, tmp_path / "run", quiet=True)
    assert len({row for row, _ in seen}) < len(seen) == len(set(seen))


def test_two_ranks_learn_what_one_does(config: RunConfig, tmp_path: Path, x86: bool) -> None:
    """Gathered embeddings, equal dice and shares of one batch: the same weights, and the same boundaries, up to the order of a sum.

    So they do while the backbone rests.
    """
    # BatchNorm sees half of the batch on each rank, so a network without it.
    config = changed(config, epochs=2, warmup_epochs=1, backbone="timm(name='test_vit', image_size=32)", evaluate_every=0)
    config = changed(config, optimizer="sgd(lr=0.1)")  # Adam would turn the last digit of a tiny gradient into a whole step
    train(config, tmp_path / "one", quiet=True)
    process = command(changed(config, device="cpu:2", strategy="ddp"), tmp_path / "two")
    text, errors = process.communicate(timeout=240)
    assert process.returncode == 0 and text.count("best epoch") == 1, errors  # of the first rank only
    one, two = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    for key in one:
        if key.startswith(("model/", "objective/")):
            torch.testing.assert_close(one[key], two[key], rtol=1e-4, atol=1e-5)
    best = json.loads((tmp_path / "two" / "done").read_text())
    # By one device, whatever trained it. On ARM, products of few rows are rounded differently, and neighbors are nearly equal.
    assert evaluate(tmp_path / "two")["recall(k=1)"] == pytest.approx(best["test/recall(k=1)"], abs=None if x86 else 0.05)


@pytest.mark.parametrize(
    ("how", "send"),
    [
        ({"device": "cpu:2", "strategy": "ddp"}, os.kill),  # the first of two ranks alone: the other one must stop with it
        ({"residence": "stream", "workers": 2}, os.killpg),  # everyone, as a scheduler does: workers must not die of it before all is saved
    ],
)
def test_a_run_of_several_processes_saves_itself_when_asked(config: RunConfig, tmp_path: Path, how: dict, send: Callable) -> None:
    config = changed(config, epochs=5000, evaluate_every=0, checkpoint_every=5000, **how)
    process = command(config, tmp_path / "run", start_new_session=True)
    try:
        deadline = time.monotonic() + 200
        while not (tmp_path / "run" / "metrics.jsonl").exists() or not read_log(tmp_path / "run"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        send(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=90)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, errors
    assert "stopped: saved" in errors and (tmp_path / "run" / "checkpoint.safetensors").exists()


@pytest.mark.parametrize("logger", ["tensorboard", "csv"])
def test_loggers_get_the_numbers(config: RunConfig, tmp_path: Path, logger: str) -> None:
    train(changed(config, epochs=1, logger=logger), tmp_path / "run", quiet=True)
    files = [file for file in (tmp_path / "run" / logger).rglob("*") if file.is_file()]
    assert any(file.stat().st_size > 100 for file in files), files
    if logger == "csv":
        assert "test/recall(k=1)" in next(file for file in files if file.suffix == ".csv").read_text()


def test_the_table_of_a_run_that_went_on_is_whole(config: RunConfig, tmp_path: Path) -> None:
    """Lightning's logger begins its file anew."""
    folder = tmp_path / "run"
    train(changed(config, epochs=1, logger="csv"), folder, quiet=True)
    (folder / "done").unlink()
    (folder / "config.toml").write_text(changed(config, epochs=2).dump())
    train(changed(config, epochs=2, logger="csv"), folder, quiet=True)
    rows = (folder / "csv" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + len(read_log(folder)) == 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the thread that writes
def test_tensorboard_on_full_disk_is_an_error_of_the_disk(config: RunConfig, tmp_path: Path, small_disk) -> None:
    config = changed(config, logger="tensorboard")
    log = Log(tmp_path, open_fabric(config, loggers=open_logger(config, tmp_path)), upto=-1)
    with small_disk(), pytest.raises(OSError, match="File too large"):
        for epoch in range(1000):
            log._send({"epoch": epoch, "loss": 1.0})


def test_loggers_are_told_how_a_run_ended(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mlflow and wandb show a run as running until its logger is closed."""
    ends = []
    monkeypatch.setattr(CSVLogger, "finalize", lambda _, status: ends.append(status))
    diverge(changed(config, logger="csv"), tmp_path / "broken")
    train(changed(config, epochs=1, logger="csv"), tmp_path / "run", quiet=True)
    assert ends == ["failed", "success"]


def test_a_logger_that_is_not_installed_says_so(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UnimetricError, match="wandb"):
        train(changed(config, logger="wandb"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("clip", ["clip_norm", "clip_value"])
def test_clipping_bounds_a_step(config: RunConfig, tmp_path: Path, clip: str) -> None:
    """With plain gradient descent a step is as long as the gradient: clipped to almost nothing, the network stands still."""
    from unimetric.runs.model import build_model

    start = build_model(config).state_dict()["backbone.layers.0.weight"]
    moved = {}
    for bound in (0.0, 1e-9):
        settings = {clip: bound, "epochs": 1, "optimizer": "sgd(lr=0.1, weight_decay=0.0, momentum=0.0)"}
        train(changed(config, **settings), tmp_path / str(bound), quiet=True)
        moved[bound] = (tensors(tmp_path / str(bound))["model/backbone.layers.0.weight"] - start).abs().max().item()
    assert moved[1e-9] < 1e-6 < moved[0.0]


def test_schedules_reach_the_optimiser(config: RunConfig, tmp_path: Path) -> None:
    train(changed(config, schedule="step(every=1, gamma=0.5)"), tmp_path / "run", quiet=True)
    assert [line["lr"] for line in read_log(tmp_path / "run")[1:]] == pytest.approx([1e-3, 5e-4, 2.5e-4])


def stop_in_epoch(epoch: int, draw: Callable) -> Callable:
    def batch(self: SamplesPerClass, number: int) -> np.ndarray:
        if (self.epoch, number) == (epoch, 1):
            raise RuntimeError("the power is gone")
        return draw(self, number)

    return batch


def test_an_objective_sees_its_views_and_is_stepped_and_resumes(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole objective from outside: second views, hooks around the step, an optimiser of its own, all of it in the checkpoint."""
    (tmp_path / "outside.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Watching(nn.Module):\n"
        "    views, reads = 2, ('images',)\n"
        "    def __init__(self, *, branches, features):\n"
        "        super().__init__()\n"
        "        self.critic = nn.Linear(branches[0], 1)\n"
        "        self.critic.own_step = True\n"
        "        self.optimizers = {'critic': torch.optim.Adam(self.critic.parameters(), lr=1e-2)}\n"
        "        self.register_buffer('count', torch.zeros(2, dtype=torch.int64))\n"
        "    def meet(self, model):\n"
        "        assert model.channels > 0\n"
        "    def begin(self):\n"
        "        self.count[0] += 1\n"
        "    def forward(self, output, labels):\n"
        "        assert len(output.views) == 1 and output.views[0].shape == output.images.shape\n"
        "        assert not torch.equal(output.views[0], output.images)\n"
        "        self.seen = output.branches[0].detach()\n"
        "        return {'loss': output.embeddings.square().mean(), 'critic': 0.01 * self.critic(output.embeddings).mean()}\n"
        "    def stepped(self):\n"
        "        self.count[1] += 1\n"
        "        with torch.enable_grad():\n"
        "            self.critic.zero_grad()\n"
        "            self.critic(self.seen).square().mean().backward()\n"
        "        self.optimizers['critic'].step()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("UNIMETRIC_TRUST", "outside")
    config = changed(config, objective="outside.Watching", epochs=2)
    train(config, tmp_path / "whole", quiet=True)
    whole = tensors(tmp_path / "whole")
    assert whole["objective/count"][0] == whole["objective/count"][1] > 0
    assert "critic/0/exp_avg" in whole
    with monkeypatch.context() as patch:
        patch.setattr("unimetric.samplers.samples_per_class.SamplesPerClass.batch", stop_in_epoch(1, SamplesPerClass.batch))
        with pytest.raises(RuntimeError, match="the power is gone"):
            train(config, tmp_path / "parts", quiet=True)
    train(config, tmp_path / "parts", quiet=True)
    for key, value in tensors(tmp_path / "parts").items():
        assert torch.equal(value, whole[key]), key


def test_settings_beside_settings_count(config: RunConfig) -> None:
    """A model without training is that of all settings; `backbone` and `seed` beside them once changed nothing, and `head` was refused."""
    for settings in ({"backbone": "small(channels=8)"}, {"seed": 3}, {"head": "identity"}):
        found = evaluate(config, metrics=["spectral_decay"], **settings)
        assert found == evaluate(changed(config, **settings), metrics=["spectral_decay"])
        assert found != evaluate(config, metrics=["spectral_decay"])


def test_a_loss_written_inside_the_objective_is_the_runs(config: RunConfig, tmp_path: Path) -> None:
    """What trains and measures knew it; what measured the run later, adapted it, or checked its miner took `loss` instead."""
    from unimetric.analysis.adapt import _boundary
    from unimetric.runs.model import build_model
    from unimetric.training.build import build_objective

    inside = changed(config, objective="s2sd(loss='hyperbolic(curvature=0.5)', dims=(8,))", head="linear(dim=3)", epochs=1)
    best = train(changed(inside, metrics=["map_at_r"]), tmp_path / "run", quiet=True)
    assert evaluate(tmp_path / "run")["map_at_r"] == pytest.approx(best["test/map_at_r"], rel=1e-9)
    assert _boundary(changed(config, objective="s2sd(loss='margin(beta=0.6)')")) == 0.6
    assert _boundary(changed(config, objective="s2sd(loss='triplet')", loss="margin(beta=0.6)")) == 1.2
    assert _boundary(changed(config, objective="diva(rho=100.0)", loss="margin(beta=0.9)")) == 0.9
    for settings in ({"objective": "s2sd(loss='n_pair')"}, {"objective": "s2sd", "loss": "n_pair"}):
        with pytest.raises(UnimetricError, match="the loss `n_pair` takes none"):
            build_objective(changed(config, miner="rho", **settings), build_model(config), num_classes=6)
    build_objective(changed(config, miner="rho", objective="s2sd(loss='triplet')", loss="n_pair"), build_model(config), num_classes=6)


@pytest.mark.parametrize("parts", [{}, {"head": "crt(dim=8, hidden=12, prototypes=4)", "objective": "crt"}])
def test_a_hyperbolic_run_is_measured_in_the_ball(config: RunConfig, tmp_path: Path, parts: dict[str, str]) -> None:
    from unimetric.runs.embed import space_of
    from unimetric.spec import create

    config = changed(config, loss="hyperbolic(curvature=0.5)", epochs=1, **parts)
    best = train(config, tmp_path / "run", quiet=True)
    assert evaluate(tmp_path / "run")["recall(k=1)"] == pytest.approx(best["test/recall(k=1)"])
    table = create("datasets", config.dataset)
    space = space_of(torch.randn(len(table), 8), table, np.arange(len(table)), loss=create("losses", config.loss))
    assert (space.geometry, space.curvature) == ("poincare", 0.5)
