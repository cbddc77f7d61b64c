"""Two minutes that show the whole road: letters in, an embedding out, measured on letters it never saw."""

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
    """Train on half of the characters, test on the other half, and say what to type next.

    Args:
        folder: the run folder; an interrupted demo goes on in it.

    Returns:
        recall@1 before and after.
    """
    print("Characters of eight scripts, drawn from the typefaces on this machine. Half of them are never shown in training.")
    best = train(load(**SETTINGS), folder)
    untrained = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    before, after = untrained["test/recall(k=1)"], best["test/recall(k=1)"]
    print(f"""
The nearest neighbour of a character never seen is the same character:
  untrained   {100 * before:5.1f} % of the time
  trained     {100 * after:5.1f} %   ({after / before:.1f} times as often)

Next:
  unimetric evaluate {folder} --metrics "recall(k=1); recall(k=10); nmi; map_at_r" --explain
  unimetric list losses
  unimetric train glyphs_margin "loss=multi_similarity" miner= --out runs/multi_similarity
  unimetric pack "folder(root='my/pictures')" --out mine.pack        # a folder with one sub-folder a class
  unimetric train glyphs_margin "dataset=pack(path='mine.pack')" "transform=base(size=64, resize=72)" --out runs/mine""")
    return {"before": before, "after": after}
