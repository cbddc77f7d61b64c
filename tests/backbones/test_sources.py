"""Where weights come from: the tag that a name resolves to, models of the hub, and folders."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import constants

from unimetric.backbones._hub import resolve_weights
from unimetric.config import RunConfig, from_settings, load
from unimetric.errors import UnimetricError
from unimetric.runs.folder import lock_run_folder, pretrained_weights
from unimetric.spec import create


def test_a_name_without_a_tag_resolves_to_timms_default() -> None:
    assert resolve_weights("resnet50") == f"resnet50.{timm.get_pretrained_cfg('resnet50').tag}"
    assert resolve_weights("resnet50.tv_in1k") == "resnet50.tv_in1k"
    assert resolve_weights("hf-hub:owner/model") == "hf-hub:owner/model"
    assert resolve_weights("resnet50.no_such_tag") == "resnet50.no_such_tag"


@pytest.mark.parametrize(
    ("backbone", "expected"),
    [
        ("timm(name='test_resnet', pretrained=True)", "test_resnet.r160_in1k"),
        ("timm(name='test_resnet')", ""),
        ("small(channels=8)", ""),
    ],
)
def test_run_folder_names_the_weights(backbone: str, expected: str, config: RunConfig, tmp_path: Path) -> None:
    changed = from_settings(asdict(config) | {"backbone": backbone})
    assert pretrained_weights(changed) == expected
    with lock_run_folder(changed, tmp_path / "run", device=torch.device("cpu")):
        pass
    text = (tmp_path / "run" / "config.toml").read_text()
    assert text.startswith(f"# weights of the backbone: {expected}\n") == bool(expected)
    assert json.loads((tmp_path / "run" / "environment.json").read_text()).get("weights", "") == expected
    assert load(tmp_path / "run" / "config.toml").run_id == changed.run_id


def test_resolved_tag_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    original = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, *, pretrained, **options: original(name, **options))  # no download
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with caplog.at_level(logging.WARNING, "unimetric"):
        create("backbones", "timm(name='test_resnet', pretrained=True)")
        create("backbones", "timm(name='test_resnet.r160_in1k', pretrained=True)")
    assert [each.getMessage() for each in caplog.records] == ["timm: the weights of `test_resnet` are `test_resnet.r160_in1k`"]


@pytest.mark.parametrize(
    ("name", "hint"), [("hf-hub:owner/model", "downloaded models are read from"), ("local-dir:no/such/folder", "needs `config.json`")]
)
@pytest.mark.parametrize("pretrained", [False, True])
def test_missing_source_is_an_error_with_a_hint(name: str, hint: str, pretrained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UnimetricError, match=f"timm cannot create `{name}`") as caught:
        create("backbones", f"timm(name='{name}', pretrained={pretrained})")
    assert hint in caught.value.hint


def test_folder_of_a_plain_network_is_read(tmp_path: Path) -> None:
    network = timm.create_model("test_vit", num_classes=0, img_size=64)
    timm.models.save_for_hf(network, tmp_path, model_args={"img_size": 64}, safe_serialization=True)
    read = create("backbones", f"timm(name='local-dir:{tmp_path}', pretrained=True)")
    assert all(torch.equal(value, read.network.state_dict()[key]) for key, value in network.state_dict().items())
    assert read(torch.randn(1, 3, 64, 64)).shape == (1, 17, 64)
    assert not torch.equal(create("backbones", f"timm(name='local-dir:{tmp_path}')").network.pos_embed, network.pos_embed)
