"""The page of results is made of the committed numbers, and the numbers carry nothing of the machine they were made on."""

from __future__ import annotations

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
    {"epoch": 2, "loss": 0.4, "seconds": 3.5, "pictures_per_second": 300.0, "test/recall(k=1)": 0.612345678, "term/loss": 0.1},
    {"epoch": 3, "loss": 0.3, "seconds": 1.0, "pictures_per_second": 200.0, "test/recall(k=1)": 0.6},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run_3"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (folder / "environment.json").write_text('{"device": "H", "torch": "2", "platform": "secret"}')
    return folder


def results(folder: Path, tables: str, runs: dict[str, Any]) -> Any:
    (folder / "tables.toml").write_text(tables)
    (folder / "some.json").write_text(json.dumps({"runs": runs}))
    return page.Results(folder)


def lines(*recalls: float) -> dict[str, Any]:
    return {"session": "x", "lines": [{"epoch": 5 * place, "test/recall": recall} for place, recall in enumerate(recalls)]}


TABLE = """
[table.t]
files   = ["some.json"]
best    = "test/recall"
columns = [
  { head = "best", metric = "test/recall", bold = true },
  { head = "last", metric = "test/recall", epoch = "last", scale = 1, digits = 3 },
  { head = "at", metric = "epoch", scale = 1, digits = 0 },
  { head = "paper", text = "paper" },
]
rows = [
  { label = "three", runs = ["a", "b", "c"], paper = "63.1" },
  { label = "one", runs = ["a"] },
  { label = "printed", cells = ["64.0", "", "30", ""] },
]
"""


FIGURE = """
[figure.f]
table = "t"
x     = "last"
y     = "best"
"""


def test_the_committed_page_is_what_the_committed_numbers_make() -> None:
    assert page.page() == (ROOT / "docs" / "results.md").read_text(encoding="utf-8"), "run `make results`"


def test_doctests_of_the_scripts() -> None:
    assert doctest.testmod(page).failed == doctest.testmod(collect).failed == 0


def test_committed_numbers_name_no_machine_and_settings_that_exist() -> None:
    for path in (ROOT / "results").glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"""['"= (]~?/\w|shards\.""", text), path
        for name, run in json.loads(text).get("runs", {}).items():
            assert run["lines"] and run["session"], name
            from_settings(run["settings"], f"{path.name}: {name}")


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
def test_of_a_path_the_name_is_kept(value: Any, kept: Any) -> None:
    assert collect.scrubbed(value, {}) == kept


def test_what_is_kept_of_a_run(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    (run / "train.json").write_text('{"spectral_decay": 0.12345678}')
    collect.main([str(run), "--out", str(out), "--session", "third", "--rename", "shards.cub=pack(path='cub.pack')"])
    kept = json.loads(out.read_text())["runs"]["run_3"]
    assert kept["settings"] == {
        "dataset": "pack(path='cub.pack')",
        "split": "published(path='cars splits.json', split=8, validation=True)",
        "backbone": "timm(name='resnet50', weights='resnet50.safetensors', stride_first=True)",
        "seed": 3,
    }
    assert (kept["seconds"], kept["pictures_per_second"], kept["epochs"], kept["device"], kept["session"]) == (6.5, 200, 3, "H", "third")
    assert kept["train"] == {"train/spectral_decay": 0.123457}
    assert kept["lines"] == [{"epoch": e, "test/recall(k=1)": r} for e, r in ((0, 0.4), (2, 0.612346), (3, 0.6))]
    assert "secret" not in out.read_text()
    assert sum('"epoch"' in line for line in out.read_text().splitlines()) == 3  # one a line
    other = run.rename(run.with_name("other"))
    collect.main([str(other), "--out", str(out)])
    assert set(json.loads(out.read_text())["runs"]) == {"run_3", "other"}


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnimetricError, match=r"config\.toml is absent"):
        collect.collect(tmp_path, {}, "")


def test_mean_and_spread_over_seeds(tmp_path: Path) -> None:
    found = results(tmp_path, TABLE, {"a": lines(0.1, 0.62, 0.5), "b": lines(0.2, 0.64, 0.6), "c": lines(0.3, 0.3, 0.66)})
    assert found.as_markdown("t").splitlines() == [
        "| | best | last | at | paper |",
        "|---|---|---|---|---|",
        "| three | **64.0 +- 2.0** | 0.587 +- 0.081 | 7 +- 3 | 63.1 |",
        "| one | 62.0 | 0.500 | 5 | |",
        "| printed | **64.0** | | 30 | |",
    ]
    assert found.fill("is {{ cell: t > one > best }}, {{ cell: t > printed > at }}") == "is 62.0, 30"


def test_cost_of_a_table(tmp_path: Path) -> None:
    cost = [{"epochs": 2, "seconds": 1000.4, "pictures_per_second": speed} for speed in (100, 900, 300)]
    runs = {name: lines(0.5) | each for name, each in zip("abc", cost, strict=True)}
    found = results(tmp_path, TABLE, runs)
    assert found.fill("{{ time: t }}") == "3 runs, 3,001 s of training in all, median 300 pictures/s"
    assert "| b | some.json | x | 2 | 1,000 | 900 |" in found.fill("{{ runs }}")


def test_another_metric_may_choose_the_epoch(tmp_path: Path) -> None:
    told = [{"epoch": 1, "test/recall": 0.7, "validation/recall": 0.8}, {"epoch": 2, "test/recall": 0.6, "validation/recall": 0.9}]
    runs = {name: {"session": "x", "lines": told} for name in "abc"}
    found = results(tmp_path, TABLE.replace("bold = true", 'best = "validation/recall"'), runs)
    assert found.fill("{{ cell: t > one > best }} at {{ cell: t > one > at }}") == "60.0 at 1"


def test_area_over_splits_and_its_spread_over_seeds(tmp_path: Path) -> None:
    tables = """
[table.t]
files   = ["some.json"]
best    = "test/recall"
columns = [
  { head = "AGS", metric = "test/recall", ags = { near = 10.0, far = 30.0 } },
  { head = "train", metric = "train/decay", of = "near" },
]
rows    = [{ label = "m", near = ["a", "b"], far = ["c", "d"] }]
"""
    runs = {name: lines(0.1, recall) | {"train": {"train/decay": 0.5}} for name, recall in zip("abcd", (0.8, 0.7, 0.6, 0.4), strict=True)}
    assert results(tmp_path, tables, runs).as_markdown("t").endswith("| m | 62.5 +- 10.6 | 50.0 +- 0.0 |")  # 0.70 and 0.55
    with pytest.raises(UnimetricError, match="not as many runs of every split"):
        results(tmp_path, tables.replace('["c", "d"]', '["c"]'), runs).as_markdown("t")


def test_correlation_of_two_columns_and_its_picture(tmp_path: Path) -> None:
    tables = TABLE.replace('label = "printed"', 'label = "two", runs = ["c"] },\n  { label = "printed"') + FIGURE
    found = results(tmp_path, tables, {"a": lines(0.1, 0.6, 0.5), "b": lines(0.2, 0.6, 0.6), "c": lines(0.3, 0.3, 0.7)})
    assert [(round(x, 6), round(y, 6), label) for x, y, label in found.points("t", "last", "best")] == [
        (0.6, 63.333333, "three"),
        (0.5, 60.0, "one"),
        (0.7, 70.0, "two"),
    ]
    assert found.fill("{{ correlation: t > last > best }}") == "0.98 over 3"
    found.draw(tmp_path)
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("{{ table: t }}", r"some\.json: no run `c`, which table `t` of tables\.toml names", "known: a, b"),
        ("{{ table: u }}", r"tables\.toml: no table `u`", "known: t"),
        ("{{ cell: t > one > bests }}", r"tables\.toml: table `t` has no `bests`", "did you mean `best`"),
        ("{{ cell: t > one }}", r"page\.md: cannot read `cell: t > one`", "write `{{ cell: table > row > column }}`"),
        ("{{ correlation: t > best > lost }}", r"tables\.toml: table `t` has no `lost`", "did you mean `last`"),
        ("{{ tabel: t }}", r"page\.md: cannot read `{{ tabel: t }}`", "did you mean `table`"),
    ],
)
def test_what_is_missing_is_named(text: str, says: str, hint: str, tmp_path: Path) -> None:
    found = results(tmp_path, TABLE, {"a": lines(0.5), "b": lines(0.5)})
    with pytest.raises(UnimetricError) as refused:
        found.fill(text)
    assert re.search(says, refused.value.message)
    assert hint in refused.value.hint


def test_a_metric_that_was_not_measured_is_named(tmp_path: Path) -> None:
    found = results(
        tmp_path, TABLE.replace('metric = "test/recall", bold', 'metric = "test/recal", bold'), dict.fromkeys("abc", lines(0.5))
    )
    with pytest.raises(UnimetricError, match=r"some\.json: run `a` has no `test/recal`"):
        found.as_markdown("t")
