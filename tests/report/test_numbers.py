"""Means, intervals, values of the papers, shifts and correlations."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from unimetric.config import better
from unimetric.report import report
from unimetric.report.figures import galleries, project
from unimetric.report.folders import Record, read_runs
from unimetric.report.numbers import Method, _tables, at_own_epochs, correlations, is_structure, methods, published, shift_of, shifts
from unimetric.report.tables import as_latex, as_markdown, results
from unimetric.spec import names, parse


def record(
    run_id: str, *, split: str = "standard", seed: int = 0, recall: float = 0.5, decay: float = 0.3, **settings: str | int
) -> Record:
    known = {
        "dataset": "cub200",
        "split": split,
        "loss": "margin(beta=1.2)",
        "miner": "distance_weighted",
        "seed": seed,
        "objective": "plain",
    }
    known |= {
        "backbone": "timm(name='resnet50.tv_in1k', pretrained=True)",
        "head": "linear(dim=128)",
        "sampler": "samples_per_class(n=2, with_replacement=True)",
        "adapter": "",
    }
    best = {"epoch": 1, "test/recall(k=1)": recall, "test/spectral_decay": decay}
    return Record(Path(run_id), run_id, known | settings, [best], best, {}, {})


def test_methods_group_seeds_with_interval() -> None:
    values = [0.61, 0.63, 0.64, 0.60]
    found = methods([record(str(seed), seed=seed, recall=value) for seed, value in enumerate(values)])
    assert len(found) == 1
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert math.isclose(found[0].mean("recall(k=1)"), np.mean(values))
    assert math.isclose(2 * found[0].half("recall(k=1)"), high - low)
    assert math.isnan(Method("one", [record("a")]).half("recall(k=1)"))
    assert math.isnan(Method("two", [record("a"), record("b", recall=0.6)]).half("recall(k=1)"))
    older, newer = record("old", seed=0), record("new", seed=1, chosen_by=1)  # made before and after there was such a setting
    assert len(methods([older, newer])) == 1 and len(methods([older, record("two", seed=1, chosen_by=2)])) == 2


def test_own_epochs_keep_structure_at_best_epoch() -> None:
    lines = [
        {"epoch": 0, "test/recall(k=1)": 0.9, "test/nmi": 0.9, "test/spectral_decay": 0.1},  # nothing is trained yet
        {"epoch": 1, "test/recall(k=1)": 0.5, "test/nmi": 0.7, "test/spectral_decay": 0.2},
        {"epoch": 2, "loss": 1.0},
        {"epoch": 3, "test/recall(k=1)": 0.6, "test/nmi": 0.6, "test/spectral_decay": 0.3},
    ]
    one = replace(record("a"), lines=lines, best=lines[3])
    own = at_own_epochs(one)
    assert [one.value(metric) for metric in ("recall(k=1)", "nmi", "spectral_decay")] == [0.6, 0.6, 0.3]
    assert [own.value(metric) for metric in ("recall(k=1)", "nmi", "spectral_decay")] == [0.6, 0.7, 0.3]


def test_lower_is_better_if_run_records_it() -> None:
    def one(run_id: str, loss: str, *errors: float) -> Record:
        lines = [{"epoch": epoch, "test/my.error": error, "test/my.each/a": error} for epoch, error in enumerate(errors, 1)]
        best = lines[-1] | {"lower_is_better": ["my.error", "my.each"]}
        return replace(record(run_id, loss=loss), lines=lines, best=best, gallery=_pictures())

    found = [one("a", "margin", 0.5, 0.3, 0.4), one("b", "arcface", 0.2, 0.1, 0.7)]
    assert [at_own_epochs(run).value("my.error") for run in found] == [0.3, 0.1]
    (table,) = results(methods(found))
    assert table.metrics == ["my.error", "my.each/a"]
    assert [[cell.best for cell in cells] for _, _, cells in table.rows] == [[True, True], [False, False]]
    assert [each["value"] for each in galleries(methods(found[::-1]), 1)[0]] == ["my.error 0.4000"]


def _pictures() -> dict[str, np.ndarray]:
    two, none = np.arange(2), np.zeros(0, np.uint8)
    names = {"labels": two, "names": np.array(["x", "y"]), "source": np.array([""]), "shift": np.array(math.nan), "ends": np.zeros(2, int)}
    return names | {"embeddings": np.eye(2), "queries": two, "neighbours": two[:, None], "thumbnails": none, "spectrum": np.ones(2)}


def test_is_structure_agrees_with_metric_declarations() -> None:
    structure = {name for name in names("metrics") if better(name) == "neither"}
    assert "spectral_decay" in structure
    assert structure == set(filter(is_structure, names("metrics")))


def test_is_structure_reads_inner_metric_and_keys() -> None:
    assert is_structure("per_source(metric='spectral_decay')/cub200")
    assert not is_structure("per_source(metric='recall(k=1)')/my (set)")
    assert not is_structure("density") and not is_structure("my.metric") and not is_structure("a(")


def test_methods_are_named_by_differing_settings() -> None:
    found = methods([record("a", loss="margin(beta=0.6)"), record("b"), record("c", device="cuda")])
    assert [method.name for method in found] == ["margin(beta=0.6)", "margin(beta=1.2)"]
    assert [len(method.runs) for method in found] == [1, 2]  # where it ran makes no difference


def test_precision_defines_method_only_in_its_study() -> None:
    every = [
        record(f"{precision} {seed}", seed=seed, precision=precision, recall=recall)
        for precision, recall in (("32-true", 0.5), ("bf16-mixed", 0.7))
        for seed in (0, 1)
    ]
    assert [len(method.runs) for method in methods(every)] == [4]
    study = [replace(run, labels={"precision": run.settings["precision"], "seed": str(run.settings["seed"])}) for run in every]
    assert [(method.name, method.mean("recall(k=1)")) for method in methods(study)] == [("32-true", 0.5), ("bf16-mixed", 0.7)]


def test_published_requires_same_settings() -> None:
    def of(**settings: str) -> str | None:
        value = published(Method("", [record("a", **settings)]), "recall(k=1)")
        return value and value.text

    assert of() == "63.09 ± 0.46"
    assert of(loss="margin(beta=0.6)", miner="rho(p_switch=0.4)") == "64.93 ± 0.42"
    assert of(loss="margin(beta=0.6)", miner="rho(p_switch=0.3)") is None  # other settings, no value
    assert of(head="linear(dim=512)") is None
    assert of(sampler="frechet_matching") == "62.64 ± 0.34"
    assert of(sampler="samples_per_class(n=2)") is None  # the authors draw with replacement
    assert of(backbone="timm(name='resnet50', pretrained=True)") is None  # other weights
    shifted = {"dataset": "cars196", "split": "published(path='x.json', split=8)", "sampler": "samples_per_class(n=2)"}
    assert of(**shifted, head="linear(dim=512)", loss="margin(beta=1.2, or_count=True)") == "64.77"
    assert of(**shifted, head="linear(dim=512)", loss="margin(beta=1.2)") is None  # divided by pairs
    assert of(dataset="glyphs") is None
    assert of(dataset="cub200(root='elsewhere')") == "63.09 ± 0.46"
    packed = replace(record("a", dataset="pack(path='x.pack')"), gallery={"source": np.array(["cub200"])})
    assert published(Method("", [packed]), "nmi").text == "68.21 ± 0.33"  # type: ignore[union-attr]
    crt = {"backbone": "mit(name='b1', pretrained=True)", "head": "crt", "objective": "crt", "loss": "multi_similarity(kept_only=False)"}
    assert of(**crt, miner="", sampler="samples_per_class(n=5)") == "75.95"
    assert of(**crt, miner="", sampler="samples_per_class(n=5)", split="ood(path='x.json', split=9)") is None  # the table has no shift
    assert of(**shifted, head="linear(dim=128)", loss="margin(beta=1.2, or_count=True)") is None  # the table's has 512


def test_published_requires_all_datasets() -> None:
    puma = {
        "backbone": "timm(name='vit_small_patch16_224', pretrained=True)",
        "loss": "curricularface(margin=0.3, scale=32.0, per_class_t=True, lr=1.0, weight_decay=1e-4)",
        "miner": "",
        "sampler": "shuffle",
        "adapter": "puma",
    }
    eight = ["cub200", "cars196", "sop", "inshop", "nabirds", "dogs", "flowers102", "aircraft"]

    def harmonic(run: Record) -> str | None:
        value = published(Method("", [run]), "harmonic")
        return value and value.text

    assert harmonic(record("a", dataset=f"union(parts={eight})", **puma)) == "84.1"
    assert harmonic(record("a", dataset=f"union({[*eight[1:], 'cub200(root=0)']})", **puma)) == "84.1"
    assert harmonic(record("a", dataset=f"union(parts={eight[:4]})", **puma)) is None
    packs = record("a", dataset="union(parts=['pack(path=0)', 'pack(path=1)'])", **puma)
    assert harmonic(replace(packs, gallery={"source": np.array(eight)})) == "84.1"
    assert harmonic(replace(packs, gallery={"source": np.array(eight[:2])})) is None


def test_papers_toml_is_valid() -> None:
    for table in _tables()["table"]:
        for row in table["rows"]:
            assert len(row["values"]) == len(table["metrics"])
            assert all(0 < float(value.split()[0]) < 100 for value in row["values"])
            for key, text in (table["when"] | row["when"]).items():
                assert text == "" or parse(text), (key, text)


def test_shifts_computes_ags() -> None:
    every = [
        record(str(number), dataset="cars196", split=f"published(path='x', split={number})", recall=0.9 - number / 20)
        for number in (1, 2, 3)
    ]
    assert [shift_of(run) for run in every] == [8.6, 14.3, 32.2]
    curves = shifts(methods(every), "recall(k=1)")
    x = [0, (14.3 - 8.6) / (32.2 - 8.6), 1]
    area = x[1] * (0.85 + 0.80) / 2 + (1 - x[1]) * (0.80 + 0.75) / 2
    assert len(curves) == 1
    assert math.isclose(curves[0]["ags"], area)
    assert math.isnan(shift_of(record("a")))
    assert math.isnan(shift_of(record("a", split="ood(path='mine.json', split=2)")))  # a file of one's own, which was not looked into
    assert shifts(methods([record("a"), record("b", split="few_shot")]), "recall(k=1)") == []


def test_shifts_separates_methods_of_one_name() -> None:
    every = [
        replace(
            record(f"{epochs} {number}", dataset="cars196", split=f"published(path='x', split={number})", epochs=epochs, recall=recall),
            labels={"method": "Margin"},  # as two studies may call it
        )
        for epochs, recall in ((20, 0.5), (200, 0.7))
        for number in (1, 2)
    ]
    assert [curve["name"] for curve in shifts(methods(every), "recall(k=1)")] == ["Margin", "Margin"]
    assert [curve["y"] for curve in shifts(methods(every), "recall(k=1)")] == [[0.5, 0.5], [0.7, 0.7]]


def test_correlations_match_scipy() -> None:
    values = [(0.5, 0.3), (0.6, 0.25), (0.7, 0.1), (0.65, 0.2)]
    found = methods([record(str(seed), seed=seed, recall=recall, decay=decay) for seed, (recall, decay) in enumerate(values)])
    (row,) = correlations(found, ["recall(k=1)", "spectral_decay"])
    assert math.isclose(row["r"], stats.pearsonr(*zip(*values, strict=True))[0])


def test_results_leave_missing_metrics_empty() -> None:
    without = replace(record("b", loss="arcface"), best={"epoch": 1, "test/recall(k=1)": 0.7})
    (table,) = results(methods([record("a"), without]))
    assert [[cell.mean for cell in cells] for _, _, cells in table.rows] == [["50.00", "0.300"], ["70.00", ""]]
    assert [cells[0].best for _, _, cells in table.rows] == [False, True]
    assert not any(cells[1].best for _, _, cells in table.rows)  # structure has no best


def test_tables_in_every_format(runs: Callable[..., Path], tmp_path: Path) -> None:
    place = runs(6)
    report([place], tmp_path / "report.html")
    markdown = (tmp_path / "report.md").read_text()
    assert "| arcface <2> | 2 | **52.10 [52.00, 52.20]** (62.67 ± 0.67) | 0.479 [0.478, 0.480] |" in markdown
    assert "| margin(beta=1.2) <0> | 2 | 50.10 [50.00, 50.20] (63.09 ± 0.46) |" in markdown
    assert "| method | seeds | recall(k=1) (%) | spectral_decay |" in markdown
    with open(tmp_path / "report.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 2
    assert [rows[0][key] for key in ("mean", "half_interval", "low", "high", "unit")] == ["50.10", "", "50.00", "50.20", "percent"]
    assert (rows[1]["metric"], rows[1]["unit"]) == ("spectral_decay", "")
    assert rows[0]["source"] == "Roth et al. 2020, table 2"
    latex = (tmp_path / "report.tex").read_text()
    assert r"multi\_similarity" in latex
    assert r"$\mathbf{52.10 [52.00, 52.20]}$ (62.67 ± 0.67)" in latex
    assert latex.count(r"\\") == 4
    tables = results(methods(read_runs([place])[0]))
    assert as_markdown(tables) == markdown
    assert as_latex(tables) == latex


def test_interval_needs_three_seeds() -> None:
    two = [record(str(seed), seed=seed, recall=value, decay=11.027) for seed, value in enumerate((0.45, 0.53))]
    three = [*two, record("2", seed=2, recall=0.49, decay=11.027)]
    assert "| 49.00 [45.00, 53.00] (63.09 ± 0.46) | 11.027 [11.027, 11.027] |" in as_markdown(results(methods(two)))
    half = 100 * stats.t.ppf(0.975, 2) * np.std([0.45, 0.53, 0.49], ddof=1) / math.sqrt(3)
    assert f"| 49.00 ± {half:.2f} (63.09 ± 0.46) | 11.027 ± 0.000 |" in as_markdown(results(methods(three)))


def test_project_few_points_and_dimensions() -> None:
    rng = np.random.default_rng(0)
    projection, points = project(rng.standard_normal((10, 1)))
    assert projection == "PCA"
    assert points.shape == (10, 2)
    assert np.isfinite(points).all()


def test_report_of_500_runs(runs: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    import time

    place = runs(500, epochs=30, points=12)
    begun = time.perf_counter()
    skipped = report([place], tmp_path / "report.html", galleries=4)
    with capsys.disabled():
        print(f" [500 runs in {time.perf_counter() - begun:.1f} s] ", end="")
    assert not skipped
    text = (tmp_path / "report.html").read_text()
    assert "500 runs, 250 methods" in text
    data = json.loads(text.partition('type="application/json">')[2].partition("</script>")[0].replace("<\\/", "</"))
    assert len(data["galleries"]) == 4
    assert len(data["curves"][0]["lines"]) == 250
