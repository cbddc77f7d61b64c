"""Configs and studies carry the settings of the papers that they cite, and the check notices if they do not."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import timm

from unimetric.errors import UnimetricError
from unimetric.report.folders import Record
from unimetric.report.numbers import Method
from unimetric.report.published import published
from unimetric.spec import parse
from unimetric.studies import protocols
from unimetric.studies.ranges import read_any

GRIDS = Path(__file__).parents[2] / "src" / "unimetric" / "configs" / "studies"
CONFIGS = sorted([*GRIDS.parent.glob("*.toml"), *GRIDS.glob("*.toml")])


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
        ("puma_table5", "SoftTriple", {"loss": "soft_triple(scale=20.0, centers_per_class=10, tau=0.0, lr=1.0, weight_decay=1e-4)"}),
        ("puma_table5", "ArcFace", {"loss": "arcface(scale=64.0, fallback=True, lr=1.0, weight_decay=1e-4)"}),
        ("puma_table5", "SupCon", {"loss": "sup_con(pairwise=True)"}),
        ("puma_table5", "ProxyNCA++", {"loss": "proxy_nca_pp(temperature=1.0, lr=1.0, weight_decay=1e-4)"}),
        ("puma_table8", "MS + XBM", {"objective": "cross_batch(size=4096, memory_only=True)"}),
        ("puma_table8", "Triplet + XBM", {"objective": "cross_batch(size=4096, memory_only=True)", "miner": "hardest"}),
    ],
)
def test_rows_have_settings_of_the_paper(grid: str, method: str, wanted: dict[str, Any]) -> None:
    for found in settings(grid, method=method):
        assert {key: found[key] for key in wanted} == wanted


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_name_the_pretrained_weights(path: Path) -> None:
    """Without a tag, timm selects weights of its own, which are not those of the papers."""
    for name in re.findall(r"timm\(name='([^']*)'[^)]*pretrained=True", path.read_text()):
        assert "." in name and timm.models.get_pretrained_cfg(name) is not None, name


def test_googlenet_uses_227_pixels() -> None:
    transforms = {
        name: settings("revisiting_figure2_cub200", setting=name)[0]["transform"] for name in ("GoogLeNet, 512", "BN-Inception, 512")
    }
    assert transforms == {"GoogLeNet, 512": "base(size=227)", "BN-Inception, 512": "base"}


def test_puma_few_shot_epochs() -> None:
    for found in settings("puma_figure6"):
        shots = parse(found["split"]).named["shots"]
        assert found["epochs"] == 32 // shots + 1
        assert found["head"] == "linear(dim=384)" and found["schedule"] == "cosine(floor=0.1)"


def test_published_value_shows_next_to_the_config() -> None:
    for name, value in (("oodml_cars196_margin", "83.89"), ("oodml_cars196_multi_similarity", "84.33")):
        (run,) = read_any(GRIDS.parent / f"{name}.toml")
        found = published(Method("", [Record(Path(), "", asdict(run.config), [], {}, {}, {})]), "recall(k=1)")
        assert found is not None and found.text == value


@pytest.mark.parametrize("path", sorted([*GRIDS.glob("crt_*.toml"), *GRIDS.parent.glob("crt_*.toml")]), ids=lambda path: path.stem)
def test_crt_has_spectra_and_five_images_per_class(path: Path) -> None:
    for run in read_any(path):
        found = asdict(run.config)
        assert {"spectral_decay", "spectral_decay(drop_largest=0)"} <= set(found["metrics"])
        large = found["dataset"] in ("sop", "inshop")
        assert found["sampler"] == "samples_per_class(n=5)" and found["batch_size"] == (180 if large else 80)
        assert found["transform"] == "crt" and found["optimizer"] == "adam(lr=3e-5, weight_decay=5e-4)"
        if parse(found["objective"]).name == "crt":
            assert parse(found["objective"]).named.get("high", 0.1) == (0.9 if large else 0.1)


def test_all_configs_agree_with_their_protocols() -> None:
    assert protocols.check(CONFIGS, complete=True) == []


def test_every_study_of_a_paper_cites_it() -> None:
    cited = {protocol.name: protocol.cited for protocol in protocols.read_protocols()}
    for path in CONFIGS:
        for paper, texts in cited.items():
            if paper in path.stem:
                assert any(text in path.read_text() for text in texts), path


@pytest.fixture(scope="module")
def read() -> list[protocols.Protocol]:
    return protocols.read_protocols()


@pytest.mark.parametrize(
    ("name", "old", "new", "key"),
    [
        ("s2sd_cars196", "beta=0.6, or_count=True", "beta=0.6", "loss.or_count"),
        ("s2sd_cars196", "weight=50.0, feature", "weight=5.0, feature", "objective.weight"),
        ("s2sd_cars196", "p_switch=0.3", "p_switch=0.35", "miner.p_switch"),
        ("r_margin_cars196", "p_switch=0.35", "p_switch=0.2", "miner.p_switch"),
        ("r_margin_cub200", "rho(p_switch=0.4)", "distance_weighted", "loss.beta"),
        ("oodml_cars196_margin", "= 200", "= 24", "epochs"),
        ("multi_similarity_sop", "resnet50.tv_in1k", "resnet50", "backbone.name"),
        ("uniform_prior_sop", ", train_affine=True", "", "backbone.train_affine"),
        ("diva_cub200", "= 108", "= 112", "batch_size"),
        ("diva_cub200", "auxiliary='margin(or_count=True)', ", "", "objective.auxiliary"),
        ("diva_sop", 'objective = "diva(', 'objective = "plain"  # (', "head"),
        ("cub200_margin", ", with_replacement=True", "", "sampler.with_replacement"),
        ("cub200_margin", "samples_per_class(n=2, with_replacement=True)", "shuffle", "sampler"),
        ("crt_cub200", "every=41", "every=17", "schedule.every"),
        ("crt_cub200", "crt(init='kaiming')", "crt", "head.init"),
        ("crt_sop", "high=0.9", "high=0.1", "objective.high"),
        ("puma_code", ", weight_decay=1e-4)", ")", "loss.weight_decay"),
        ("universal_vpt", "placed=True", "placed=False", "adapter.placed"),
        ("universal_puma", "head_lr_scale = 3.3333", "", "head_lr_scale"),
        ("studies/proof_revisiting_cub200_a", "snr(nu=0.0)", "snr", "loss.nu"),
        ("studies/revisiting_table9_sop", "histogram(nodes=11)", "histogram", "loss.nodes"),
        ("studies/revisiting_table7_cub200", "n=4, with_replacement=True", "n=4", "sampler.with_replacement"),
        ("studies/revisiting_figure2_sop", "n_pair(scale=0.25)", "n_pair", "loss.scale"),
        ("studies/puma_table3", "puma(pool='tokens', keep=1.0)", "puma(prompts=1, keep=1.0)", "adapter.pool"),
        ("studies/oodml_figure5_cub200", "resnet101.tv_in1k", "resnet101", "backbone.name"),
    ],
)
def test_check_names_the_changed_key(name: str, old: str, new: str, key: str, tmp_path: Path, read: list[protocols.Protocol]) -> None:
    path = GRIDS.parent / f"{name}.toml"
    copy = tmp_path / path.name
    assert old in path.read_text()
    copy.write_text(path.read_text().replace(old, new))
    found = {each.key: each for each in protocols.deviations(copy, read)}
    assert key in found, list(found)
    assert str(found[key]).startswith(f"{copy}: ") and found[key].wanted != found[key].found


def test_command_fails_if_a_config_deviates(tmp_path: Path) -> None:
    path = GRIDS.parent / "diva_cub200.toml"
    copy = tmp_path / path.name
    copy.write_text(path.read_text().replace("= 108", "= 112"))
    assert protocols.main([str(copy)]) == 1 and protocols.main([str(path)]) == 0


def test_check_ignores_files_that_cite_no_paper(tmp_path: Path) -> None:
    copy = tmp_path / "mine.toml"
    copy.write_text(
        "# My own run.\n"
        + (GRIDS.parent / "cub200_margin.toml").read_text().replace("Roth et al. 2020", "a friend").replace("= 150", "= 3")
    )
    assert not list(protocols.deviations(copy, protocols.read_protocols()))


def test_protocols_reject_unknown_keys(tmp_path: Path) -> None:
    table = '[a]\ncited = ["A"]\nexception = []\n[[a.rule]]\nwhy = "x"\n{}\n'
    for line, message in (("set = {epoch = 3}", "no setting `epoch`"), ("values = {epochs = 3}", "values")):
        (tmp_path / "p.toml").write_text(table.format(line))
        with pytest.raises(UnimetricError, match=message):
            protocols.read_protocols(tmp_path / "p.toml")


def test_unused_entries_are_reported() -> None:
    lines = protocols.check([GRIDS.parent / "cub200_margin.toml"], complete=True)
    assert any("oodml.rule 1 applies to no run" in line for line in lines) and not any("revisiting.rule 1 " in line for line in lines)
