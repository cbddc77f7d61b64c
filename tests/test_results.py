"""The results page is made of the stored runs, and neither names a machine nor tells how the work was organized."""

from __future__ import annotations

import csv
import doctest
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unimetric.config import from_settings
from unimetric.errors import UnimetricError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
VERDICTS = {"*refuted*", "*confirmed*", "*not confirmed*", "*not tested at the paper's length*", "*not testable*"}
DIARY = re.compile(
    r"\b(first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth) (session|day)|\bsessions?\b|earlier pages?|left out again"
    r"|beside (\w+ )?(others?|other runs)\b|taken away|\b(we|our|ours)\b",
    re.IGNORECASE,
)


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"results_{name}", ROOT / "results" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


page, collect = script("page"), script("collect")

CONFIG = """
dataset = "shards.cub"
split = "published(path='/data/tools/cars splits.json', split=8, validation=True)"
transform = "base"
backbone = "timm(name='resnet50', weights='/mnt/x/y z/resnet50.safetensors', stride_first=True)"
seed = 3
epochs = 10
device = "cuda"
metrics = ["recall(k=1)"]
"""
LINES = [
    {"epoch": 0, "test/recall(k=1)": 0.4},
    {"epoch": 1, "loss": 0.5, "seconds": 2.0, "pictures_per_second": 100.0},
    {
        "epoch": 2,
        "loss": 0.4,
        "seconds": 3.5,
        "pictures_per_second": 300.0,
        "test/recall(k=1)": 0.612345678,
        "test weights=1,1,1,1/recall(k=1)": 0.7,
        "term/loss": 0.1,
    },
    {"epoch": 3, "loss": 0.3, "seconds": 1.0, "pictures_per_second": 200.0, "test/recall(k=1)": 0.6},
]
SOURCE = [
    "--commit",
    "1a2b3c4",
    "--command",
    "unimetric train a \"split=published(path='/root/w/s.json')\"",
    "--date",
    "2026-01-02",
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (folder / "environment.json").write_text('{"device": "H", "torch": "2", "platform": "secret"}')
    return folder


def results(folder: Path, tables: str, runs: dict[str, Any]) -> Any:
    (folder / "tables.toml").write_text(tables)
    (folder / "some.json").write_text(json.dumps({"runs": runs}))
    return page.Results(folder)


def stored(*recalls: float, **settings: Any) -> dict[str, Any]:
    source = {"date": "2026-01-02", "commit": "1a2b3c4", "device": "H", "command": "unimetric train"}
    curve = {"epoch": [5 * place for place in range(len(recalls))], "test/recall": list(recalls)}
    return source | {"settings": settings, "epochs": 5 * (len(recalls) - 1), "curve": curve}


TABLE = """
[table.t]
title   = "Title"
caption = "Caption."
command = "unimetric train"
best    = "test/recall"
columns = [
  { head = "best", metric = "test/recall" },
  { head = "last", metric = "test/recall", epoch = "last", scale = 1, digits = 3 },
  { head = "at", metric = "epoch", scale = 1, digits = 0 },
  { head = "paper", text = "paper" },
  { head = "first", metric = "test/recall", epoch = "first", hidden = true },
]
rows = [
  { label = "three", runs = "a", paper = "63.1" },
  { label = "two", runs = "b" },
  { label = "one", runs = "c_0" },
]
"""
RUNS = {
    "a_0": stored(0.1, 0.62, 0.5),
    "a_1": stored(0.2, 0.64, 0.6, seed=1),
    "a_2": stored(0.3, 0.3, 0.66, seed=2),
    "b_0": stored(0.1, 0.6),
    "b_1": stored(0.2, 0.62, seed=1),
    "c_0": stored(0.9, 0.5),
}


# --- the committed page --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made() -> Any:
    """All stored runs, which take seconds to read."""
    return page.Results()


def test_page_and_csv_match_the_stored_runs(made: Any) -> None:
    for source, target in page.PAGES.items():
        written = (ROOT / "docs" / target).read_text(encoding="utf-8")
        assert made.fill((ROOT / "results" / source).read_text(encoding="utf-8")) == written, "run `make results`"
    assert made.as_csv() == (ROOT / "results" / "runs.csv").read_text(encoding="utf-8"), "run `make results`"


def test_page_is_short() -> None:
    assert len(PAGE.split()) <= 3000


SOURCES = [
    "docs/results.md",
    "docs/speed.md",
    "results/page.md",
    "results/speed.md",
    "results/LOG.md",
    "results/tables.toml",
    "results/runs.csv",
]


@pytest.mark.parametrize("path", SOURCES)
def test_texts_contain_no_diary(path: str) -> None:
    assert not DIARY.search((ROOT / path).read_text(encoding="utf-8"))


def test_stored_files_contain_no_diary() -> None:
    for path in (ROOT / "results").glob("*.json"):
        assert not DIARY.search(path.read_text(encoding="utf-8")), path.name


def test_stored_files_name_everything_once() -> None:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]
        return dict(pairs)

    for path in (ROOT / "results").glob("*.json"):
        json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)


@pytest.mark.parametrize(
    "text", ["Fifth session.", "in the second session", "Earlier pages had", "was left out again", "beside five other runs"]
)
def test_diary_words_are_found(text: str) -> None:
    assert DIARY.search(text)


def test_tables_name_command_commit_and_seeds() -> None:
    claims, *others = re.findall(r"((?:^(?!\|).*\n)*)((?:^\|.*\n)+)", PAGE, re.MULTILINE)
    assert len(others) >= 10
    for text, table in others:
        caption = text.rpartition("\n**")[2]
        assert "Command: `" in caption, caption
        assert "seeds" in caption, caption
        assert re.search(r"commits? [0-9a-f]{7}", caption) or "|commit|" in table, caption
    verdicts = {line.split("|")[3].strip() for line in claims[1].splitlines()[2:]}
    assert verdicts <= VERDICTS
    assert "*confirmed*" in verdicts


def test_short_runs_give_no_verdict() -> None:
    for line in PAGE.splitlines():
        if re.search(r"\b(10|12|24|32|40|48|80|90)( of \d+)? epochs", line) and line.startswith("|") and line.count("|") == 5:
            assert "*not tested at the paper's length*" in line, line


def test_page_states_cpu_and_compilation_of_losses_x86_first() -> None:
    speed = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    rows = speed.partition("**Losses against pytorch-metric-learning")[2].partition("\n\n")[2].splitlines()
    assert "|device |compiled |" in rows[0]
    assert "Xeon" in rows[2]
    assert "|yes |" in rows[2]


def test_doctests_of_the_scripts() -> None:
    assert doctest.testmod(page).failed == doctest.testmod(collect).failed == 0


# --- the stored runs -----------------------------------------------------------------------------------------------------


def test_stored_runs_name_no_machine_and_valid_settings() -> None:
    names: list[str] = []
    for path in (ROOT / "results").glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"""['"= (]~?/\w|shards\.""", text), path
        for name, run in json.loads(text).get("runs", {}).items():
            names.append(name)
            assert name.endswith(f"_{run['settings'].get('seed', 0)}"), name
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", run["date"]), name
            assert re.fullmatch(r"[0-9a-f]{7,40}", run["commit"]), name
            assert run["device"] and run["command"].startswith("unimetric "), name
            assert len({len(values) for values in run["curve"].values()}) <= 1, name
            from_settings(run["settings"], f"{path.name}: {name}")
    assert len(names) == len(set(names))


def test_benchmarks_name_their_source() -> None:
    for name, record in json.loads((ROOT / "results" / "benchmarks.json").read_text())["benchmarks"].items():
        assert all(record[key] for key in ("label", "device", "date", "commit", "command")), name


def test_csv_lists_every_run(made: Any) -> None:
    rows = list(csv.DictReader((ROOT / "results" / "runs.csv").read_text(encoding="utf-8").splitlines()))
    assert {row["run"] for row in rows} == set(made.runs)
    row = next(row for row in rows if row["run"] == "cars80_rmargin_0")
    assert (row["file"], row["seed"], row["epochs"], row["best_epoch"]) == ("cars196.json", "0", "80", "78")
    assert (row["test/recall(k=1)"], row["date"], row["commit"], row["device"]) == ("0.811377", "2026-11-15", "376df9e", "NVIDIA H200")
    assert row["method"] == "plain | linear(dim=128) | margin(beta=0.6) | rho(p_switch=0.2) | samples_per_class(n=2)"
    assert row["command"].startswith("unimetric train configs/")


# --- collect.py ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("/data/x.safetensors", "x.safetensors"),
        ("timm(weights='/a b/c/x.pt', image_size=224)", "timm(weights='x.pt', image_size=224)"),
        (
            "union(parts=[\"pack(path='/a/b.pack')\", \"pack(path='~/c/d.pack')\"])",
            "union(parts=[\"pack(path='b.pack')\", \"pack(path='d.pack')\"])",
        ),
        ("pack(path='../../me/x.pack')", "pack(path='x.pack')"),
        ("timm(name='hub:owner/net')", "timm(name='hub:owner/net')"),
        (["ratio(a=1)", "/x/y"], ["ratio(a=1)", "y"]),
        ("adam(lr=1e-5)", "adam(lr=1e-5)"),
        (0.5, 0.5),
    ],
)
def test_scrub_keeps_the_file_name_of_a_path(value: Any, kept: Any) -> None:
    assert collect.scrub(value, {}) == kept


def test_collect_stores_settings_source_and_curve(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    (run / "train.json").write_text('{"spectral_decay": 0.12345678}')
    collect.main([str(run), "--into", str(out), *SOURCE, "--rename", "shards.cub=pack(path='cub.pack')"])
    kept = json.loads(out.read_text())["runs"]["run_3"]
    assert kept["settings"] == {
        "dataset": "pack(path='cub.pack')",
        "split": "published(path='cars splits.json', split=8, validation=True)",
        "backbone": "timm(name='resnet50', weights='resnet50.safetensors', stride_first=True)",
        "seed": 3,
    }
    assert (kept["seconds"], kept["pictures_per_second"], kept["epochs"]) == (6.5, 200, 3)
    assert (kept["date"], kept["commit"], kept["device"]) == ("2026-01-02", "1a2b3c4", "H")
    assert kept["command"] == "unimetric train a \"split=published(path='s.json')\""
    assert kept["train"] == {"train/spectral_decay": 0.123457}
    assert kept["curve"] == {
        "epoch": [0, 2, 3],
        "test/recall(k=1)": [0.4, 0.612346, 0.6],
        "test weights=1,1,1,1/recall(k=1)": [None, 0.7, None],
    }
    assert "secret" not in out.read_text()


def test_collect_adds_to_a_file_and_takes_the_device(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    collect.main([str(run), "--into", str(out), *SOURCE])
    other = run.rename(run.with_name("other_3"))
    collect.main([str(other), "--out", str(out), *SOURCE, "--device", "NVIDIA H200", "--prefix", "ood200_"])
    runs = json.loads(out.read_text())["runs"]
    assert {name: kept["device"] for name, kept in runs.items()} == {"run_3": "H", "ood200_other_3": "NVIDIA H200"}


def test_collect_names_a_folder_that_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UnimetricError, match=r"config\.toml is missing"):
        collect.collect(tmp_path, {}, {})


def test_collect_stores_distances_of_splits(tmp_path: Path) -> None:
    step = {"key": "0", "distance": 1.23456789, "train": ["a"]}
    found = {"format": "f", "pictures": 2, "no_shift": 0.5, "plateau": "4", "splits": {"1": step}, "history": [step]}
    (tmp_path / "s.json").write_text(json.dumps(found))
    collect.main([str(tmp_path / "s.json"), "--into", str(tmp_path / "out.json"), *SOURCE])
    kept = json.loads((tmp_path / "out.json").read_text())
    assert kept["history"] == [{"key": "0", "distance": 1.23457}]
    assert kept["commit"] == "1a2b3c4"


# --- page.py -------------------------------------------------------------------------------------------------------------


def test_table_shows_mean_range_and_source(tmp_path: Path) -> None:
    assert results(tmp_path, TABLE, RUNS).as_table("t").splitlines() == [
        "**Title.** Caption. H; commits 1a2b3c4 (2026-01-02); seeds 0, 1, 2. Command: `unimetric train`.",
        "",
        "| |best |last |at |paper|",
        "|--- |--- |--- |--- |---|",
        "|three |64.0±2.0 |0.587±0.081 |5\u201310 |63.1|",
        "|two |60.0\u201362.0 |0.600\u20130.620 |5 ||",
        "|one |50.0 |0.500 |5 ||",
    ]


def test_placeholders_are_filled_inner_ones_first(tmp_path: Path) -> None:
    found = results(tmp_path, TABLE + "[figure.f]\ntable = 't'\nshift = 'recall'\n", RUNS)
    assert found.fill("{{ cell: t > one > best }} {{ cell: t > one > first }}") == "50.0 90.0"
    assert found.fill("{{ correlation: t > best > last }}") == "0.92 (3 rows)"
    assert found.fill("{{ difference: t > best > last }}") == "-57.8±4.2 (3 rows)"
    assert found.fill("{{ rarer: t > best }}") == "8.7 points (3 runs)"
    assert found.fill("{{ figure: f ; {{ cell: t > one > best }} }}{{ figure: g ; none }}") == "![50.0](f.png)"


def test_correlation_and_points_have_the_rows_with_both_values(tmp_path: Path) -> None:
    decay = '{ head = "decay", metric = "test/recall", of = "decay", epoch = "last" }, '
    tables = (
        TABLE.replace("columns = [", f"columns = [{decay}")
        .replace('runs = "a"', 'runs = "a", decay = "a"')
        .replace('"b"', '"b", decay = "b"')
    )
    found = results(tmp_path, tables + "[figure.f]\ntable = 't'\npoints = { x = 'decay', y = 'best' }\n", RUNS)
    assert found.fill("{{ correlation: t > best > decay }}") == "-1.00 (2 rows)"
    assert found.points(found.tables["t"], "decay", "best").keys() == {"three", "two"}
    # The four rows below correlate by 0.8: Fisher's interval is tanh(atanh(0.8) +- 1.96).
    rows = "".join(f'{{ label = "{x}", x = "{x}", y = "{y}" }},\n' for x, y in ((1, 1), (2, 3), (3, 2), (4, 4)))
    columns = ", ".join(f'{{ head = "{name}", text = "{name}", scale = 1 }}' for name in "xy")
    four = results(tmp_path, f"[table.u]\nbest = 'x'\ncolumns = [{columns}]\nrows = [{rows}]\n", RUNS)
    assert four.fill("{{ correlation: u > x > y }}") == "0.80 (4 rows, 95 % interval -0.70 to 1.00)"
    found.draw(tmp_path)
    assert (tmp_path / "f.png").stat().st_size > 0


def test_a_text_counts_as_the_number_that_it_begins_with(tmp_path: Path) -> None:
    tables = TABLE.replace("63.1", "64.9±0.4").replace('runs = "b"', 'runs = "b", paper = "none"')
    found = results(tmp_path, tables, RUNS)
    assert found.means(found.tables["t"], "paper") == {"three": 64.9}


def test_best_epoch_may_be_selected_by_another_metric(tmp_path: Path) -> None:
    run = stored(0.1, 0.7, 0.6)
    run["curve"]["validation/recall"] = [0.1, 0.8, 0.9]
    tables = TABLE.replace(
        '{ head = "best", metric = "test/recall" }', '{ head = "best", metric = "test/recall", best = "validation/recall" }'
    )
    found = results(tmp_path, tables, dict.fromkeys(RUNS, run))
    assert found.fill("{{ cell: t > one > best }} at {{ cell: t > one > at }}") == "60.0 at 5"


def test_area_over_splits_is_computed_per_seed(tmp_path: Path) -> None:
    tables = """
[table.t]
best    = "test/recall"
columns = [
  { head = "AGS", metric = "test/recall", ags = { near = 10.0, far = 30.0 } },
  { head = "train", metric = "train/decay", of = "near" },
  { head = "few", metric = "few_shot/5/gain", of = "near" },
]
rows    = [{ label = "m", near = "n", far = "f" }, { label = "other", near = "f", far = "f" }]
[figure.area]
table   = "t"
shift   = "recall"
"""
    runs = {name: stored(0.1, recall) for name, recall in zip(("n_0", "n_1", "f_0", "f_1"), (0.8, 0.7, 0.6, 0.4), strict=True)}
    runs = {name: run | {"train": {"train/decay": 0.5}, "few_shot": {"few_shot/5/gain": [0.03, 0.01]}} for name, run in runs.items()}
    found = results(tmp_path, tables, runs)
    assert found.fill("{{ cell: t > m > AGS }}, {{ cell: t > m > train }}, {{ cell: t > m > few }}") == "55.0\u201370.0, 50.0, 3.0±1.0"
    found.draw(tmp_path)
    assert (tmp_path / "area.png").read_bytes().startswith(b"\x89PNG")


LONG = """
[table.long]
title    = "Long"
caption  = "Caption."
command  = "unimetric train"
evidence = "split 8"
best     = "test/recall"
optional = true
columns  = [{ head = "best", metric = "test/recall" }, { head = "at", metric = "epoch", scale = 1, digits = 0 }]
rows = [
  { label = "margin", runs = { epochs = 10, split = "split=8", miner = "distance_weighted" } },
  { label = "R-margin", runs = { epochs = 10, split = "split=8", miner = "rho" } },
  { label = "DiVA", runs = { epochs = 10, objective = "diva" } },
  { label = "DiVA, equal", variant = "weights=1,1,1,1", runs = { epochs = 10, objective = "diva" } },
]
[figure.curves]
table  = "long"
curves = { "recall@1 (%)" = "test/recall" }
"""


def test_new_long_runs_appear_by_their_settings(tmp_path: Path) -> None:
    claim = "{{ verdict: long > best > R-margin over margin ; +2.0 }}"
    found = results(tmp_path, LONG, {})
    assert found.as_table("long") == "**Long.** Caption. No such runs are stored yet. Command: `unimetric train`."
    assert found.fill(claim) == "*not tested at the paper's length* |not run"
    found.draw(tmp_path)
    assert not (tmp_path / "curves.png").exists()
    split = "published(path='x.json', split=8, on_missing='skip')"
    plain = stored(0.3, 0.6, 0.5, split=split, miner="distance_weighted")
    rho = stored(0.3, 0.5, 0.7, split=split, miner="rho(p_switch=0.35)")
    short = stored(0.3, 0.9, split=split, miner="rho(p_switch=0.35)", epochs=10)
    diva = stored(0.3, 0.4, 0.5, split=split, objective="diva(rho=100.0)")
    diva["curve"]["test weights=1,1,1,1/recall"] = [0.3, 0.8, None]
    found = results(tmp_path, LONG, {"m_0": plain, "r_0": rho, "r_1": short, "d_0": diva})
    assert found.as_table("long").splitlines()[-4:] == [
        "|margin |60.0 |5|",
        "|R-margin |70.0 |10|",
        "|DiVA |50.0 |10|",
        "|DiVA, equal |80.0 |5|",
    ]
    assert found.fill(claim) == "*confirmed* |split 8: R-margin 70.0, margin 60.0"
    assert found.fill("{{ verdict: long > best > DiVA over margin, R-margin ; +4 }}").startswith("*not confirmed* |split 8: DiVA 50.0, ")
    found.draw(tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("seeds", "paper", "verdict"), [(3, "+4.3", "refuted"), (3, "+4.0", "not confirmed"), (2, "+4.3", "not confirmed")]
)
def test_three_seeds_refute_what_their_interval_excludes(seeds: int, paper: str, verdict: str, tmp_path: Path) -> None:
    # 50.0, 52.0, 54.0 and 51.0, 52.0, 53.0: the 95 % interval of Welch's difference is 0.0±4.16 (t = 3.219 at 2.94 degrees of freedom).
    split = "published(path='x.json', split=8)"
    runs = {f"r_{seed}": stored(0.3, 0.2, 0.50 + 0.02 * seed, split=split, miner="rho") for seed in range(seeds)}
    runs |= {f"m_{seed}": stored(0.3, 0.2, 0.51 + 0.01 * seed, split=split, miner="distance_weighted") for seed in range(seeds)}
    runs["m_0"]["curve"]["test/recall"][-1] += 1e-6  # R-margin is not above margin
    text = results(tmp_path, LONG, runs).fill("{{ verdict: long > best > R-margin over margin ; " + paper + " }}")
    assert text.startswith(f"*{verdict}* |")
    assert ("difference from margin -0.0±4.2, paper" in text) == (seeds == 3)


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("{{ table: u }}", r"page\.md: unknown table `u`", "known: t"),
        ("{{ cell: t > one > bests }}", r"page\.md: unknown column `bests`", "did you mean `best`"),
        ("{{ cell: t > on > best }}", r"page\.md: unknown row `on`", "did you mean `one`"),
        ("{{ cell: t > one }}", r"page\.md: cannot read `{{ cell: t > one }}`", "docstring"),
        ("{{ verdict: t > best > one over tow ; +1 }}", r"page\.md: unknown row `tow`", "did you mean `two`"),
        ("{{ tabel: t }}", r"page\.md: cannot read `{{ tabel: t }}`", "docstring"),
    ],
)
def test_unknown_names_are_reported(text: str, says: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(UnimetricError) as error:
        results(tmp_path, TABLE, RUNS).fill(text)
    assert re.search(says, error.value.message)
    assert hint in error.value.hint


def test_missing_runs_and_metrics_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UnimetricError, match=r"tables\.toml: no runs for row `one`"):
        results(tmp_path, TABLE, {name: run for name, run in RUNS.items() if name != "c_0"})
    found = results(tmp_path, TABLE.replace('head = "best", metric = "test/recall"', 'head = "best", metric = "test/recal"'), RUNS)
    with pytest.raises(UnimetricError, match=r"some\.json: run `a_0` has no `test/recal`"):
        found.as_table("t")
