"""Small studies, trained once: letters for retrieval and shifts, four scripts for universal learning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unimetric.analysis.split import features_of, make_splits, write_splits
from unimetric.config import load
from unimetric.images import packing
from unimetric.spec import create
from unimetric.studies.grid import expand
from unimetric.studies.local import save_run_labels
from unimetric.training.loop import train

SMALL = {
    "transform": "glyphs(size=32)",
    "backbone": "small(channels=8)",
    "head": "linear(dim=4)",
    "optimizer": "adam(lr=1e-3)",
    "batch_size": 24,
    "epochs": 1,
    "logger": "none",
    "device": "cpu",
    "workers": 0,
}


def train_study(folder: Path, **grid: Any) -> Path:
    """Train every run of a grid, with the labels that `unimetric bench` writes."""
    runs = expand(SMALL | grid)
    folder.mkdir(parents=True, exist_ok=True)
    save_run_labels(runs, str(folder))
    for run in runs:
        train(run.config, folder / run.config.run_id, quiet=True)
    return folder


def read_values(study: Path) -> list[dict[str, Any]]:
    """Read labels and test metrics of a study from its files, without the code that is tested."""
    labels = json.loads((study / "study.json").read_text())
    found = []
    for run_id, names in labels.items():
        line = json.loads((study / run_id / "done").read_text())
        found.append({"labels": names, "folder": study / run_id} | {key[5:]: value for key, value in line.items() if key[:5] == "test/"})
    return found


def is_png(path: Path) -> bool:
    return path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 5000


@pytest.fixture(scope="session")
def study(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two losses, and two factors: the dimension and the batch."""
    setting = [{"name": "dimension", "head": ["linear(dim=2)", "linear(dim=4)"]}, {"name": "batch", "batch_size": [12, 24]}]
    return train_study(
        tmp_path_factory.mktemp("study") / "runs",
        dataset=f"pack(path='{letters}')",
        metrics=["recall(k=1)", "map_at_r", "nmi", "spectral_decay"],
        epochs=3,
        evaluate_every=3,
        loss=["margin", "multi_similarity"],
        seed=[0, 1],
        setting=setting,
    )


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Three training and three test classes of each script in a list, as a pack."""
    folder = tmp_path_factory.mktemp("scripts")

    def write(blocks: str) -> Path:
        path = folder / f"{blocks.replace(',', '_')}.pack"
        if not path.exists():
            table = create("datasets", f"glyphs(blocks={blocks.split(',')})")
            kept = []
            for source in range(len(table.source_names)):
                for side in (True, False):
                    kept.append(np.unique(table.labels[(table.source == source) & (table.train == side)])[:3])
            packing.write(path, table.take(np.isin(table.labels, np.concatenate(kept))), short_side=None, encoding="raw")
        return path

    return write


@pytest.fixture(scope="session")
def shifted(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Splits of letters, features of two networks, and one method with two seeds on two splits, another with one seed."""
    folder, dataset = tmp_path_factory.mktemp("shifted"), f"pack(path='{letters}')"
    for name, backbone in (("a", "small(channels=8)"), ("b", "small(channels=16)")):
        table, features = features_of(load(**SMALL | {"dataset": dataset, "backbone": backbone}), path=folder / f"{name}.npz")
        splits = make_splits(table, features, swaps=1, count=3, easier=2, removal=False, choose=2)
        write_splits(folder / f"{name}.json", splits, {"dataset": dataset})
    both = [f"ood(path='{folder / 'a.json'}', split={number})" for number in (1, 2)]
    common = {"dataset": dataset, "metrics": ["recall(k=1)", "map_at_r"], "split": both}
    train_study(folder / "runs", loss="margin", seed=[0, 1, 2], **common)
    train_study(folder / "runs", loss="triplet", seed=0, **common)
    return folder


@pytest.fixture(scope="session")
def universal(scripts: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a small universal run."""
    return {
        "dataset": f"pack(path='{scripts('latin,armenian')}')",
        "backbone": "timm(name='test_vit', image_size=32)",
        "head": "linear(dim=8)",
        "loss": "normalized_softmax",
        "sampler": "shuffle",
        "metrics": ["harmonic", "unified", "per_source"],
    }
