import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from unimetric.config import RunConfig, load
from unimetric.runs.device import Fabric, evaluation_batch, open_fabric, resource
from unimetric.runs.embed import embed_all
from unimetric.runs.model import build_model
from unimetric.spec import create

SETTINGS = {"dataset": "glyphs(blocks='armenian')", "transform": "glyphs", "backbone": "small(channels=16)", "device": "cpu"}


def test_evaluation_batch_follows_the_device():
    fabric = open_fabric(load(**SETTINGS))
    assert evaluation_batch(RunConfig(), fabric) == 32
    assert evaluation_batch(RunConfig(evaluate_batch=256), fabric) == 256


def test_evaluation_batch_is_not_part_of_the_run_id():
    assert load(evaluate_batch=256).run_id == load().run_id


def test_size_of_the_batch_does_not_change_embeddings():
    sizes = []
    found = []
    for batch in (0, 256):
        config = load(**SETTINGS, evaluate_batch=batch)
        model = build_model(config)
        model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
        table = create("datasets", config.dataset).take(np.arange(300))
        found.append(embed_all(open_fabric(config), config, model, table))
    assert set(sizes[:10]) == {32} and set(sizes[10:]) == {256}
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_convolutions_are_channels_last_on_a_cpu():
    config = load(**SETTINGS)
    model = build_model(config)
    plain = create("backbones", config.backbone)
    plain.load_state_dict(model.backbone.state_dict())
    images = torch.randn(4, 3, 32, 32)
    weights = [parameter for parameter in model.backbone.parameters() if parameter.dim() == 4]
    assert weights and all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
    torch.testing.assert_close(model.backbone.eval()(images), plain.eval()(images), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="an option of the C library of GNU")
def test_memory_of_large_tensors_is_kept() -> None:
    """In another process: after an allocation that has failed, the C library uses another heap, which keeps nothing."""
    code = """
import resource, torch
from unimetric.runs.device import keep_freed_memory

def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
count_faults()
print(count_faults())
"""
    found = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True)
    assert int(found.stdout) < 10 * 2**26 / resource.getpagesize() / 4


def test_compiled_graphs_survive_in_the_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unimetric.runs.device.cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "chosen")
    monkeypatch.delenv("UNIMETRIC_CACHE", raising=False)
    open_fabric(RunConfig(device="cpu"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "chosen"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    with monkeypatch.context() as shared:
        shared.setenv("UNIMETRIC_CACHE", str(tmp_path))
        open_fabric(RunConfig(device="cpu"))
        assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    (tmp_path / "cache").write_text("a file: no folder can be made")
    open_fabric(RunConfig(device="cpu"))
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    (tmp_path / "cache").unlink()
    open_fabric(RunConfig(device="cpu"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "compiled")


def test_fabric_is_imported_once_and_without_torchmetrics(tmp_path: Path) -> None:
    """`pytorch-lightning` contains `lightning_fabric`, but is no distribution `lightning-fabric`."""
    (tmp_path / "lightning.py").write_text("raise SystemExit('lightning is imported, too')")
    (tmp_path / "torchmetrics.py").write_text("__version__ = '1.0.0'")
    code = """
import importlib.metadata, sys
known = importlib.metadata.version
def version(name):
    if name == "lightning-fabric":
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)
importlib.metadata.version = version
import unimetric.runs.device as device
assert device.Fabric.__module__.startswith("lightning_fabric") and device.VERSION[0].isdigit(), device.VERSION
assert "torchmetrics" not in sys.modules
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_attention_is_not_computed_by_cudnn() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    open_fabric(RunConfig(device="cpu"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()


def test_one_device_does_not_look_for_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialize() -> bool:
        raise AssertionError("MPI was initialized")

    environment = importlib.import_module(Fabric.__module__.rpartition(".")[0] + ".plugins.environments.mpi").MPIEnvironment
    monkeypatch.setattr(environment, "detect", staticmethod(initialize))
    assert open_fabric(RunConfig(device="cpu")).world_size == 1
    with pytest.raises(AssertionError, match="MPI"):
        open_fabric(RunConfig(device="cpu:2"), several=True)
