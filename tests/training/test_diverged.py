"""A diverged network stops the run, and finite weights stay on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.runs.weights import read_tensors
from unimetric.spec import names
from unimetric.training import loop
from unimetric.training.loop import train

PARTS = [
    *({"loss": name} for name in names("losses")),
    *({"loss": "margin", "miner": name} for name in names("miners")),
    *({"objective": name, "head": f"{name if name in names('heads') else 'linear'}(dim=8)"} for name in names("objectives")),
]


@pytest.mark.parametrize("settings", PARTS, ids=lambda settings: "-".join(settings.values()))
def test_run_with_a_nan_row_stops(settings: dict[str, str], config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = loop.Output

    def broken(embeddings: torch.Tensor, *rest: object) -> object:
        spoiled = embeddings.clone()
        spoiled[0] = torch.nan
        return whole(spoiled, *rest)

    monkeypatch.setattr(loop, "Output", broken)
    with pytest.raises(UnimetricError, match="not finite"):
        train(replace(config, **settings, epochs=1, evaluate_every=0), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


def test_weights_that_are_not_finite_replace_no_file(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step of the second epoch spoils the weights, so the loss of that epoch is finite, and nothing evaluates them."""
    step = loop.take_step
    folder = tmp_path / "run"

    def spoil(state, batch, now):  # type: ignore[no-untyped-def]
        result = step(state, batch, now)
        if now >= 2 - 1.5 / state.steps:
            with torch.no_grad():
                next(state.bare.head.parameters()).fill_(torch.nan)
        return result

    monkeypatch.setattr(loop, "take_step", spoil)
    with pytest.raises(UnimetricError, match="weights are not finite"):
        train(replace(config, epochs=3, evaluate_every=0), folder, quiet=True)
    tensors, _ = read_tensors(folder / "checkpoint.safetensors")
    assert all(torch.isfinite(value).all() for value in tensors.values() if value.is_floating_point())


def test_error_names_the_checkpoint_only_if_there_is_one(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = replace(config, optimizer="sgd(lr=1e30)")
    with pytest.raises(UnimetricError, match="not finite") as caught:
        train(first, tmp_path / "none", quiet=True)
    assert "checkpoint" not in str(caught.value)
    step = loop.take_step
    monkeypatch.setattr(loop, "take_step", lambda state, batch, now: (step(state, batch, now)[0] + (torch.inf if now >= 1 else 0), {}))
    with pytest.raises(UnimetricError, match="the last checkpoint is unchanged"):
        train(config, tmp_path / "one", quiet=True)
