"""The two-minute demo: train on letters, and evaluate on other letters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unimetric.config import load
from unimetric.training.loop import train

#: The settings of the demo; `src/unimetric/configs/glyphs_margin.toml` is the same run with comments.
SETTINGS: dict[str, Any] = {
    "dataset": "glyphs",
    "transform": "glyphs",
    "backbone": "small",
    "loss": "margin(beta=1.2)",
    "optimizer": "adam(lr=1e-3, weight_decay=4e-4)",
    "metrics": ["recall(k=1)", "map_at_r"],
    "epochs": 6,
}


def demo(folder: Path) -> dict[str, float]:
    """Train on half of the characters, test on the other half, and print the next commands.

    Args:
        folder: Run folder. An unfinished demo there is resumed.

    Returns:
        Recall@1 `before` and `after` training.
    """
    print("Images of characters of eight scripts, drawn with the fonts of this machine. Half of the characters are test classes.")
    best = train(load(**SETTINGS), folder)
    untrained = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    before, after = untrained["test/recall(k=1)"], best["test/recall(k=1)"]
    print(f"""
Recall@1 on characters that were not in training (the nearest neighbor is the same character):
  before training   {100 * before:5.1f} %
  after training    {100 * after:5.1f} %   ({after / before:.1f} times as often)

Next:
  unimetric evaluate {folder} --metrics "recall(k=1); recall(k=10); nmi; map_at_r" --explain
  unimetric list losses
  unimetric train glyphs_margin "loss=multi_similarity" miner= --out runs/multi_similarity
  unimetric pack "folder(root='my/images')" --out mine.pack        # a folder with one subfolder per class
  unimetric train glyphs_margin "dataset=pack(path='mine.pack')" "transform=base(size=64, resize=72)" --out runs/mine""")
    return {"before": before, "after": after}
