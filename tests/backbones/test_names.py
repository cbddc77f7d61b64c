"""Every backbone that docs/concepts/backbones.md names builds, and gives the tokens that stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from unimetric.spec import create

PAGE = (Path(__file__).parents[2] / "docs" / "concepts" / "backbones.md").read_text()
ROWS = re.findall(r"^\| [^|]+ \| `([^`]+)` \| (\d+) \| (\d+) \|$", PAGE, re.M)


def test_the_table_is_there() -> None:
    assert len(ROWS) == 21


@pytest.mark.parametrize(("text", "positions", "channels"), ROWS, ids=[row[0] for row in ROWS])
def test_tokens_have_the_documented_shape(text: str, positions: str, channels: str) -> None:
    if text.startswith("mit"):
        pytest.importorskip("transformers")
    with torch.device("meta"):  # shapes without arithmetic
        backbone = create("backbones", text).eval()
        assert backbone(torch.empty(2, 3, 224, 224)).shape == (2, 1 + int(positions), int(channels))
    assert backbone.channels == int(channels)
    assert len(backbone.mean) == len(backbone.std) == 3


def test_statistics_are_the_networks_own() -> None:
    with torch.device("meta"):
        clip = create("backbones", "timm(name='vit_base_patch16_clip_quickgelu_224.openai')")
        vit = create("backbones", "timm(name='vit_small_patch16_224')")
    assert clip.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073)) and clip.std == pytest.approx(
        (0.26862954, 0.26130258, 0.27577711)
    )
    assert vit.mean == vit.std == (0.5, 0.5, 0.5)
