"""Studies have the papers' values: what a table was made with, where it is not what a part does by itself."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from unimetric.bench.grid import read_any
from unimetric.report.folders import Record
from unimetric.report.numbers import Method, _agrees, _tables
from unimetric.spec import parse

GRIDS = Path(__file__).parents[2] / "configs" / "grids"
PUMA = sorted(GRIDS.glob("puma_*.toml"))


def settings(grid: str, **labels: str) -> list[dict[str, Any]]:
    """Of the runs of a study that it calls so."""
    runs = [run for run in read_any(GRIDS / f"{grid}.toml") if labels.items() <= run.labels.items()]
    assert runs, (grid, labels)
    return [asdict(run.config) for run in runs]


@pytest.mark.parametrize(
    ("grid", "method", "wanted"),
    [
        # Roth et al. 2020: the penalty of SNR is there with rho alone, and SOP has a coarser histogram.
        *((f"revisiting_table2_{name}", "SNR (D)", {"loss": "snr(nu=0.0)"}) for name in ("cub200", "cars196", "sop")),
        *((f"revisiting_table2_{name}", "R-SNR (D)", {"loss": "snr"}) for name in ("cub200", "cars196", "sop")),
        ("revisiting_table2_cub200", "Histogram", {"loss": "histogram"}),
        ("revisiting_table2_sop", "Histogram", {"loss": "histogram(nodes=11)"}),
        # Milbich et al. 2021: 2,000 times the network's rate, and an epoch for the proxies alone on SOP.
        ("oodml_figure2_cub200", "ProxyAnchor", {"loss": "proxy_anchor(lr=2e-2)", "warmup_epochs": 0}),
        ("oodml_figure2_sop", "ProxyAnchor", {"loss": "proxy_anchor(lr=2e-2)", "warmup_epochs": 1}),
        # Kim et al. 2023: pytorch-metric-learning's losses, their own SupCon and ProxyNCA++, and its memory.
        ("puma_table5", "Triplet", {"loss": "triplet(margin=0.1, active_only=True)", "miner": "hardest"}),
        ("puma_table5", "Margin", {"loss": "margin(beta=1.2, learn_beta=False)", "miner": "distance_weighted(upper_cutoff=1.4)"}),
        ("puma_table5", "Margin, the code's miner", {"miner": "multi_similarity(epsilon=0.1)"}),
        ("puma_table5", "MS", {"loss": "multi_similarity(beta=50.0, kept_only=False)", "miner": ""}),
        ("puma_table5", "MS, the code's miner", {"miner": "distance_weighted(upper_cutoff=1.4)"}),
        ("puma_table5", "SoftTriple", {"loss": "soft_triple(scale=20.0, centers_per_class=10, tau=0.0, lr=1.0)"}),
        ("puma_table5", "ArcFace", {"loss": "arcface(scale=64.0, fallback=True, lr=1.0)"}),
        ("puma_table5", "SupCon", {"loss": "sup_con(pairwise=True)"}),
        ("puma_table5", "ProxyNCA++", {"loss": "proxy_nca_pp(temperature=1.0, lr=1.0)"}),
        ("puma_table8", "MS + XBM", {"objective": "cross_batch(size=4096, memory_only=True)"}),
        ("puma_table8", "Triplet + XBM", {"objective": "cross_batch(size=4096, memory_only=True)", "miner": "hardest"}),
    ],
)
def test_what_a_row_was_made_with(grid: str, method: str, wanted: dict[str, Any]) -> None:
    for found in settings(grid, method=method):
        assert {key: found[key] for key in wanted} == wanted


def test_googlenet_sees_227_pixels_and_other_networks_224() -> None:
    transforms = {
        name: settings("revisiting_figure2_cub200", setting=name)[0]["transform"] for name in ("GoogLeNet, 512", "BN-Inception, 512")
    }
    assert transforms == {"GoogLeNet, 512": "base(size=227)", "BN-Inception, 512": "base"}


def test_few_shots_of_puma_train_for_32_over_k_and_one_epochs() -> None:
    for found in settings("puma_figure6"):
        shots = parse(found["split"]).named["shots"]
        assert found["epochs"] == 32 // shots + 1
        assert found["head"] == "linear(dim=384)" and found["schedule"] == "cosine(floor=0.1)"


def test_puma_has_one_recipe_in_all_studies_and_every_printed_row_a_run() -> None:
    runs = [asdict(run.config) for path in PUMA for run in read_any(path)]
    assert {found["batch_size"] for found in runs} == {720} and {found["clip_value"] for found in runs} == {1.0}
    curricular = {found["loss"].partition(", lr")[0] for found in runs if found["loss"].startswith("curricular")}
    assert curricular == {"curricularface(margin=0.3, scale=32.0, per_class_t=True"}
    made = [Method("", [Record(Path(), "", found, [], {}, {}, {})]) for found in runs]
    for table in _tables()["table"]:
        for row in table["rows"] if table["source"].startswith("Kim") else ():
            assert any(_agrees(method, table["when"] | row["when"]) for method in made), row


@pytest.mark.parametrize("path", sorted([*GRIDS.glob("crt_*.toml"), *GRIDS.parent.glob("crt_*.toml")]), ids=lambda path: path.stem)
def test_crt_has_both_spectra_and_five_pictures_of_each_class(path: Path) -> None:
    for run in read_any(path):
        found = asdict(run.config)
        assert {"spectral_decay", "spectral_decay(drop_largest=0)"} <= set(found["metrics"])
        large = found["dataset"] in ("sop", "inshop")
        assert found["sampler"] == "samples_per_class(n=5)" and found["batch_size"] == (180 if large else 80)
        assert found["transform"] == "crt" and found["optimizer"] == "adam(lr=3e-5, weight_decay=5e-4)"
        if parse(found["objective"]).name == "crt":
            assert parse(found["objective"]).named.get("high", 0.1) == (0.9 if large else 0.1)
