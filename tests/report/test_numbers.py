"""Means, intervals, values of the papers, shifts and correlations."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from unimetric.config import CONFIGS, better
from unimetric.report import report
from unimetric.report.figures import correlation_plots, galleries, project, spectra
from unimetric.report.folders import Record, read_runs
from unimetric.report.numbers import (
    Method,
    at_own_epochs,
    correlations,
    is_default_split,
    is_structure,
    measured,
    methods,
    shift_of,
    shifts,
)
from unimetric.report.published import _differences, _is_method, parts, published, read_papers
from unimetric.report.tables import as_latex, as_markdown, results
from unimetric.spec import names, parse
from unimetric.studies.ranges import read_any


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
        "backbone": "timm(name='resnet50.tv_in1k', pretrained=True, frozen_batchnorm=True, train_affine=True)",
        "head": "linear(dim=128)",
        "epochs": 150,
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
    assert [method.name for method in found] == ["loss=margin(beta=0.6)", "loss=margin(beta=1.2)"]
    assert [len(method.runs) for method in found] == [1, 2]  # where it ran makes no difference
    found = methods([record("a", loss="margin", epochs=3), record("b", loss="margin", epochs=4)])
    assert [method.name for method in found] == ["epochs=3", "epochs=4"]
    assert [method.name for method in methods([record("a")])] == ["loss=margin(beta=1.2)"]


def test_methods_of_chosen_folders_are_named_by_folder() -> None:
    def run(folder: str, **settings: str | int) -> Record:
        return replace(record("id", **settings), folder=Path("runs") / folder)

    assert [method.name for method in methods([run("first"), run("second", epochs=4)])] == ["first", "second"]
    # With two seeds of a method, or two methods of one folder name, a folder does not name a method.
    seeds = [run("a", seed=0, epochs=3), run("b", seed=1, epochs=3), run("c", epochs=4)]
    assert [method.name for method in methods(seeds)] == ["epochs=3", "epochs=4"]
    assert [method.name for method in methods([run("a", epochs=3), run("a", epochs=4)])] == ["epochs=3", "epochs=4"]
    splits = [run(f"margin_{number}", split=f"published(path='x', split={number})", dataset="cars196") for number in (1, 2)]
    assert [method.name for method in methods(splits)] == ["margin_1", "margin_2"]
    # No folder names a curve over several splits.
    shifted = [replace(each, gallery={"shift": np.float64(number)}) for number, each in enumerate(splits)]
    assert [curve["name"] for curve in shifts(methods(shifted), "recall(k=1)")] == ["loss=margin(beta=1.2)"]
    labeled = replace(run("first", loss="triplet", head="mlp"), labels={"method": "Margin", "seed": "0"})
    assert [method.name for method in methods([labeled, run("second", epochs=4)])] == ["Margin", "second"]
    assert [method.name for method in methods([labeled, *splits])] == ["Margin", "margin_1", "margin_2"]
    # Settings of a study do not name other runs, nor does a folder with the name of a method of the study.
    assert [method.name for method in methods([labeled, *seeds])] == ["Margin", "epochs=3", "epochs=4"]
    assert [method.name for method in methods([labeled, run("Margin")])] == ["Margin", "loss=margin(beta=1.2)"]


def test_precision_defines_method_only_in_its_study() -> None:
    every = [
        record(f"{precision} {seed}", seed=seed, precision=precision, recall=recall)
        for precision, recall in (("32-true", 0.5), ("bf16-mixed", 0.7))
        for seed in (0, 1)
    ]
    assert [len(method.runs) for method in methods(every)] == [4]
    study = [replace(run, labels={"precision": run.settings["precision"], "seed": str(run.settings["seed"])}) for run in every]
    assert [(method.name, method.mean("recall(k=1)")) for method in methods(study)] == [("32-true", 0.5), ("bf16-mixed", 0.7)]


def value_of(run: Record, metric: str = "recall(k=1)") -> str | None:
    """The value of a paper next to a run, with the number of settings that differ."""
    value = published(Method("", [run]), metric)
    return value and value.text + f", {len(value.differs)} differ" * bool(value.differs)


def differs(**settings: str | int) -> tuple[str, ...]:
    value = published(Method("", [record("a", **settings)]), "recall(k=1)")
    assert value is not None
    return value.differs


def test_published_value_needs_the_same_method() -> None:
    def of(**settings: str | int) -> str | None:
        return value_of(record("a", **settings))

    assert of() == "63.09 ± 0.46"
    assert of(miner="distance_weighted(cutoff=0.5)") == "63.09 ± 0.46"  # the default, written
    assert of(loss="margin(beta=0.6)", miner="rho(p_switch=0.4)") == "64.93 ± 0.42"
    assert of(loss="margin(beta=0.6)", miner="rho(p_switch=0.3)") is None
    assert of(sampler="frechet_matching") == "62.64 ± 0.34"
    assert of(dataset="glyphs") is None
    assert of(dataset="cub200(root='elsewhere')") == "63.09 ± 0.46"
    assert of(backbone="timm(name='resnet18.tv_in1k', pretrained=True)") is None
    assert of(split="few_shot") is None and of(adapter="lora") is None and of(loss="margin(beta=") is None
    packed = replace(record("a", dataset="pack(path='x.pack')"), gallery={"source": np.array(["cub200"])})
    assert value_of(packed, "nmi") == "68.21 ± 0.33"


def test_published_value_names_what_differs() -> None:
    assert differs(epochs=20) == ("epochs 20, the paper 150",)
    assert differs(optimizer="adam(lr=1e-4, weight_decay=4e-4)") == ("optimizer.lr 0.0001, the paper 1e-05",)
    assert differs(batch_size=64) == ("batch_size 64, the paper 112",)
    assert differs(schedule="cosine") == ("schedule cosine, the paper constant",)
    assert differs(transform="base(size=128)") == ("transform.size 128, the paper 224",)
    assert differs(head="linear(dim=512)") == ("head.dim 512, the paper 128",)
    assert differs(sampler="samples_per_class(n=2)") == ("sampler.with_replacement False, the paper True",)
    weights = "timm(name='resnet50.a1_in1k', pretrained=True, frozen_batchnorm=True, train_affine=True)"
    assert differs(backbone=weights) == ("backbone.name resnet50.a1_in1k, the paper resnet50.tv_in1k",)
    crt = {"head": "crt(init='kaiming')", "objective": "crt", "loss": "multi_similarity(kept_only=False)", "miner": "", "epochs": 68}
    crt |= {"transform": "crt", "optimizer": "adam(lr=3e-5, weight_decay=5e-4)", "batch_size": 80, "sampler": "samples_per_class(n=5)"}
    crt |= {"schedule": "step(every=41, gamma=0.1)"}
    assert value_of(record("a", **crt, backbone="mit(name='b1', pretrained=True)")) == "75.95"
    assert differs(**crt, backbone="mit(name='b1')") == ("backbone.pretrained False, the paper True",)
    assert value_of(record("a", **crt, backbone="mit(name='b1', pretrained=True)", split="ood(path='x.json', split=9)")) is None


def test_published_value_needs_the_authors_split() -> None:
    def of(split: str, distance: float) -> tuple[str, ...]:
        settings = {
            "sampler": "samples_per_class(n=2)",
            "head": "linear(dim=512)",
            "loss": "margin(beta=1.2, or_count=True)",
            "epochs": 200,
        }
        run = record("a", dataset="cars196", split=split, **settings)
        value = published(Method("", [replace(run, gallery={"shift": np.array(distance)})]), "recall(k=1)")
        assert value is not None and value.text == "64.77"
        return value.differs

    assert of("published(path='x.json', split=8)", 122.98) == ()
    assert of("ood(path='mine.json', split=8)", 122.98) == ()  # the authors' file, by its distance
    assert of("published(path='mine.json', split=8)", 60.0) == ("split of Frechet distance 60.0, the paper 123.0",)
    (unknown,) = of("published(path='x.json', split=8)", math.nan)
    assert "may not be the authors'" in unknown


def test_studies_of_papers_have_the_settings_of_each_row() -> None:
    """Next to a run of the paper's study, no value has an asterisk, except for the split, whose file is the user's."""
    paths = [path for path in sorted(CONFIGS.glob("studies/*.toml")) if path.name.startswith(("revisiting", "oodml", "crt", "puma"))]
    settings = {run.config.run_id: asdict(run.config) for path in paths for run in read_any(path) if run.config.seed == 0}
    by_dataset: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for each in settings.values():
        by_dataset[tuple(parts(each["dataset"]))].append(Record(Path(), "", each, [], {}, {}, {}))
    count = total = 0
    for table in read_papers()["table"]:
        for row in table["rows"]:
            when = table["when"] | row["when"]
            found = [
                tuple(_differences(run, when, table["source"]))
                for run in by_dataset[tuple(parts(when["dataset"]))]
                if _is_method(run, when)
            ]
            least = min(found, key=len, default=())
            assert [each for each in least if not each.startswith("split from a file")] == [], (table["source"], row, least)
            count, total = count + bool(found), total + 1
    assert count > 0.9 * total


def test_published_requires_all_datasets() -> None:
    puma = {
        "backbone": "timm(name='vit_small_patch16_224.augreg_in21k_ft_in1k', pretrained=True)",
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
    assert harmonic(record("a", dataset=f"union(parts={eight[:4]})", **puma)) == "85.7"
    assert harmonic(record("a", dataset=f"union(parts={eight[:3]})", **puma)) is None
    packs = record("a", dataset="union(parts=['pack(path=0)', 'pack(path=1)'])", **puma)
    assert harmonic(replace(packs, gallery={"source": np.array(eight)})) == "84.1"
    assert harmonic(replace(packs, gallery={"source": np.array(eight[:2])})) is None


def test_papers_toml_is_valid() -> None:
    for table in read_papers()["table"]:
        for row in table["rows"]:
            assert len(row["values"]) == len(table["metrics"])
            values = dict(zip(table["metrics"], row["values"], strict=True))
            assert all(0 < float(value.split()[0]) < 100 for value in values.values() if value)
            for key, text in (table["when"] | row["when"]).items():
                assert text == "" or not isinstance(text, str) or parse(text), (key, text)
            recalls: dict[str, list[tuple[int, float]]] = {}
            for name, value in values.items():
                if value and (found := re.search(r"recall\(k=(\d+)\)", name)):
                    recalls.setdefault(name.replace(found[0], ""), []).append((int(found[1]), float(value.split()[0])))
            for pairs in recalls.values():  # recall rises with k
                assert [value for _, value in sorted(pairs)] == sorted(value for _, value in pairs), (table["source"], row)


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


def test_shifts_of_files_need_no_gallery(tmp_path: Path) -> None:
    file = tmp_path / "splits.json"
    file.write_text(json.dumps({"splits": {"2": {"distance": 5.5}}, "history": [{"key": "R3", "distance": 7.5}]}))
    assert shift_of(record("a", split=f"ood(path='{file}', split=2)")) == 5.5
    assert shift_of(record("b", split=f"ood(path='{file}', key='R3')")) == 7.5
    assert math.isnan(shift_of(record("c", split=f"ood(path='{file}', split=3)")))


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


def shifted_runs() -> list[Record]:
    rng = np.random.default_rng(0)
    every = []
    for split in (1, 2, 3):
        for number in range(5):
            decay, recall = rng.random(2) * split
            best = {"epoch": 1, "test/recall(k=1)": recall / 4, "train/spectral_decay": decay, "test/spectral_decay": -decay}
            run = record(f"{split} {number}", dataset="cars196", split=f"published(path='x', split={split})", epochs=number)
            every.append(replace(run, best=best))
    return every


def test_structure_is_scaled_within_each_split() -> None:
    every = shifted_runs()
    constant = replace(every[0], run_id="lone", settings=every[0].settings | {"split": "published(path='x', split=4)"})  # no range
    found = methods([*every, constant])
    (row,) = [row for row in correlations(found, measured(found)) if row["x"] == "train: spectral_decay"]
    points, default = [], []
    for split in range(3):
        some = np.array([[run.best["train/spectral_decay"], run.best["test/recall(k=1)"]] for run in every[5 * split : 5 * split + 5]])
        points.append((some - some.min(0)) / np.ptp(some, axis=0))
        default += [split == 0] * 5  # the first split of Cars196 is the default one
    x, y = np.concatenate(points).T
    assert np.allclose(sorted(point[:2] for point in row["points"]), sorted(zip(x, y, strict=True)))
    assert row["r"] == pytest.approx(stats.pearsonr(x, y)[0])
    for name, rows in (("overall", slice(None)), ("default", default)):
        line = stats.linregress(x[rows], y[rows])
        assert row["trends"][name] == pytest.approx((line.slope, line.intercept))
    plots = correlation_plots(found)
    assert [plot["title"].partition(":")[0] for plot in plots] == [
        "cars196, training embeddings, scaled per split",
        "cars196, test embeddings, scaled per split",
    ]
    assert [line["name"].partition(":")[0] for line in plots[0]["lines"][-2:]] == ["overall", "default"]
    assert [len(line["x"]) for line in plots[0]["lines"]] == [5, 5, 5, 2, 2]


def test_default_split_is_known_from_gallery() -> None:
    assert is_default_split(record("a")) and not is_default_split(record("a", split="ood(path='x', split=1)"))
    assert is_default_split(record("a", split="published(path='x', split=3)"))  # that of CUB200
    assert not is_default_split(record("a", split="published(path='x', split=3)", dataset="sop"))
    assert is_default_split(replace(record("a", split="ood(path='x', split=1)"), gallery={"default": np.array(True)}))


def test_metrics_of_training_images_are_columns_and_spectra_curves() -> None:
    best = {"epoch": 1, "test/recall(k=1)": 0.5, "train/spectral_decay": 0.25, "train/recall(k=1)": 0.9}
    best |= {f"train/singular_values/{number}": 1 / number for number in (1, 2, 10)} | {"train/class_spectra(top=1)/1": 0.5}
    found = methods([replace(record("a"), best=best, lines=[best])])
    (table,) = results(found)
    assert table.metrics == ["recall(k=1)", "train: spectral_decay", "train: recall(k=1)"]
    assert [cell.mean for cell in table.rows[0][2]] == ["50.00", "0.250", "90.00"]
    all_, within = spectra(found)
    assert all_["title"] == "cub200, standard: training embeddings" and within["title"].endswith("training embeddings within classes")
    assert (all_["lines"][0]["x"], all_["lines"][0]["y"]) == ([1, 2, 10], [1.0, 0.5, 0.1])


def test_raw_backbone_is_a_row_with_a_note() -> None:
    raw = {"test/recall(k=1)": 0.55, "test/spectral_decay": 0.1}
    every = [replace(record(str(seed), seed=seed, recall=0.5 + 0.04 * seed), raw=raw) for seed in (0, 1)]
    better_ = replace(record("c", epochs=3, recall=0.6), raw=raw)
    (table,) = results(methods([*every, better_]))
    assert [(name, seeds, cells[0].mean) for name, seeds, cells in table.rows][-1] == ("raw backbone", 0, "55.00")
    assert (
        table.notes[0] == "epochs=150: training did not help in 2 of 2 runs: recall(k=1) 52.00 at the best epoch, 55.00 of the raw backbone"
    )
    assert not any(note.startswith("epochs=3: training") for note in table.notes)
    assert "| raw backbone |  | 55.00 | 0.100 |" in as_markdown([table])
    random = [replace(run, raw=raw | {"test/recall(k=1)": 0.2 + 0.1 * seed}) for seed, run in enumerate(every)]
    assert "| raw backbone | 2 | 25.00 [20.00, 30.00] | 0.100 [0.100, 0.100] |" in as_markdown(results(methods(random)))
    other = replace(better_, settings=better_.settings | {"backbone": "small"})
    (table,) = results(methods([*every, other]))
    assert [name for name, _, _ in table.rows[2:]] == [f"raw {every[0].settings['backbone']}", "raw small"]
    (table,) = results(methods([record("a")]))
    assert [name for name, _, _ in table.rows] == ["loss=margin(beta=1.2)"] and table.notes == []


def test_untrained_best_epoch_has_a_note_even_above_the_raw_backbone() -> None:
    trained = replace(record("a"), raw={"test/recall(k=1)": 0.45, "test/spectral_decay": 0.1})
    best = trained.best | {"epoch": 0}
    untrained = replace(trained, best=best, lines=[best, trained.best])
    (table,) = results(methods([untrained]))
    note = "loss=margin(beta=1.2): training did not help: recall(k=1) 50.00 at epoch 0, before the first step, 45.00 of the raw backbone"
    assert table.notes == [note]
    for run in (trained, replace(untrained, lines=[best])):  # a better epoch, and a run of no epochs
        assert results(methods([run]))[0].notes == []


def test_pretrained_backbone_has_one_result() -> None:
    # Seeds hold out other validation classes, and one study has another metric.
    raws = [{"test/recall(k=1)": 0.55, "validation/recall(k=1)": 0.5 + 0.1 * seed} for seed in range(3)]
    every = [replace(record(str(seed), seed=seed), raw=raw) for seed, raw in enumerate(raws)]
    (table,) = results(methods(every))
    assert [(name, seeds, cells[0].mean, cells[0].half) for name, seeds, cells in table.rows][-1] == ("raw backbone", 0, "55.00", "")
    other = record("other", epochs=3)
    best = other.best | {"test/nmi": 0.7, "lower_is_better": ["nmi"]}
    (table,) = results(methods([*every, replace(other, best=best, raw=raws[0] | {"test/nmi": 0.6})]))
    name, seeds, cells = table.rows[-1]
    assert (name, seeds) == ("raw backbone", 0)
    assert dict(zip(table.metrics, [cell.mean for cell in cells], strict=True)) == {
        "recall(k=1)": "55.00",
        "spectral_decay": "",
        "nmi": "60.00",
    }


def test_methods_of_one_label_are_distinguished() -> None:
    every = [
        replace(record(f"{epochs} {seed}", epochs=epochs, seed=seed), labels={"method": "Margin"})
        for epochs in (20, 200)
        for seed in (0, 1)
    ]
    assert [(method.name, len(method.runs)) for method in methods(every)] == [("Margin, epochs=20", 2), ("Margin, epochs=200", 2)]
    split = [replace(each, settings=each.settings | {"split": "few_shot"}) for each in every[:2]]
    assert [method.name for method in methods([*split, *every[2:]])] == ["Margin", "Margin"]  # in two tables


def test_results_leave_missing_metrics_empty() -> None:
    without = replace(record("b", loss="arcface"), best={"epoch": 1, "test/recall(k=1)": 0.7})
    (table,) = results(methods([record("a"), without]))
    assert [[cell.mean for cell in cells] for _, _, cells in table.rows] == [["50.00", "0.300"], ["70.00", ""]]
    assert [cells[0].best for _, _, cells in table.rows] == [False, True]
    assert not any(cells[1].best for _, _, cells in table.rows)  # structure has no best


def test_tables_have_the_best_epochs() -> None:
    lines = [{"epoch": 1}, {"epoch": 2}]
    every = [
        replace(record(name, loss=loss, seed=seed), best={"epoch": epoch, "test/recall(k=1)": 0.5}, lines=lines)
        for name, loss, seed, epoch in (("a", "arcface", 0, 30), ("b", "arcface", 1, 36), ("c", "angular", 0, 12))
    ]
    (table,) = results(methods(every))
    (note,) = [note for note in table.notes if "best epoch" in note]
    assert note == "best epoch, mean and standard deviation over seeds: loss=arcface 33.0 ± 4.2"


def test_tables_in_every_format(runs: Callable[..., Path], tmp_path: Path) -> None:
    place = runs(6)
    report([place], tmp_path / "report.html")
    markdown = (tmp_path / "report.md").read_text()
    assert r"| arcface \<2> | 2 | **52.10 [52.00, 52.20]** (62.67 ± 0.67*) | 0.479 [0.478, 0.480] |" in markdown
    assert r"| margin(beta=1.2) \<0> | 2 | 50.10 [50.00, 50.20] (63.09 ± 0.46*) |" in markdown
    assert "| method | seeds | recall(k=1) (%) | spectral_decay |" in markdown
    with open(tmp_path / "report.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 2
    assert [rows[0][key] for key in ("mean", "half_interval", "low", "high", "unit")] == ["50.10", "", "50.00", "50.20", "percent"]
    assert (rows[1]["metric"], rows[1]["unit"]) == ("spectral_decay", "")
    assert rows[0]["source"] == "Roth et al. 2020, tables 2 and 4"
    assert (rows[0]["paper"], rows[0]["differs"]) == ("63.09 ± 0.46", "epochs 4, the paper 150")
    assert r"* arcface \<2>: Roth et al. 2020, tables 2 and 4 has other settings: epochs 4, the paper 150" in markdown
    latex = (tmp_path / "report.tex").read_text()
    assert r"multi\_similarity" in latex
    assert r"$\mathbf{52.10 [52.00, 52.20]}$ (62.67 ± 0.67{*})" in latex
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
    data = json.loads(text.partition('type="application/json">')[2].partition("</script>")[0])
    assert len(data["galleries"]) == 4
    assert len(data["curves"][0]["lines"]) == 250
