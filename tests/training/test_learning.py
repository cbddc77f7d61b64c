"""Every loss learns: letters never seen are found far better than by the untrained network."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import read_log

from unimetric.config import load
from unimetric.spec import find, names, signature
from unimetric.training.loop import train


@pytest.mark.parametrize("loss", names("losses"))
def test_a_loss_learns(loss: str, tmp_path: Path) -> None:
    proxies = "lr" in signature(find("losses", loss)).parameters  # theirs are slow: meant for ImageNet weights and many hours
    epochs, rate = (6, 3e-3) if proxies else (3, 1e-2)
    config = load(
        dataset="glyphs(blocks=['armenian', 'georgian'])",
        transform="glyphs",
        backbone="small(channels=32)",
        head="linear(dim=32)",
        loss=f"{loss}(lr=0.05)" if proxies else loss,
        sampler="samples_per_class(n=4)",
        batch_size=64,
        optimizer=f"adam(lr={rate})",
        epochs=epochs,
        evaluate_every=epochs,
        logger="none",
        device="cpu",
    )
    train(config, tmp_path / "run", quiet=True)
    before, *_, after = read_log(tmp_path / "run")
    before, after = before["test/recall(k=1)"], after["test/recall(k=1)"]
    assert after > 1.5 * before, f"{before:.3f} -> {after:.3f}"
