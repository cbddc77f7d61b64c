"""Grids: what a file with lists means, and that every study we ship makes sense."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from unimetric.config import from_settings
from unimetric.errors import UnimetricError
from unimetric.studies.grid import check_runs, expand, read_grid
from unimetric.studies.ranges import is_grid, read_any

GRIDS = sorted((Path(__file__).parents[2] / "src" / "unimetric" / "configs" / "studies").glob("*.toml"))


def test_expand_combines_lists_in_order() -> None:
    runs = expand({"epochs": [1, 2], "seed": [0, 1, 2], "loss": "margin"})
    assert [(run.config.epochs, run.config.seed) for run in runs] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    assert runs[4].labels == {"epochs": "2", "seed": "1"}
    assert len({run.config.run_id for run in runs}) == 6


def test_expand_keeps_tables_together() -> None:
    method = [{"name": "M", "loss": "margin", "miner": "distance_weighted"}, {"loss": "multi_similarity"}]
    runs = expand({"method": method, "seed": [0, 1]})
    assert [(run.config.loss, run.config.miner, run.config.seed) for run in runs] == [
        ("margin", "distance_weighted", 0),
        ("margin", "distance_weighted", 1),
        ("multi_similarity", "", 0),
        ("multi_similarity", "", 1),
    ]
    assert [run.labels["method"] for run in runs] == ["M", "M", "multi_similarity", "multi_similarity"]


def test_expand_names_the_value_without_a_component() -> None:
    assert [run.labels for run in expand({"adapter": ["", "lora"]})] == [{"adapter": "none"}, {"adapter": "lora"}]


def test_expand_varies_metrics_as_lists_of_lists() -> None:
    assert len(expand({"metrics": ["recall(k=1)", "nmi"]})) == 1
    runs = expand({"metrics": [["recall(k=1)"], ["nmi"]]})
    assert [run.config.metrics for run in runs] == [("recall(k=1)",), ("nmi",)]


def test_expand_checks_metrics_with_chosen_by() -> None:
    metrics = [["recall", "nmi"], ["recall", "pi_ratio"]]
    assert len(expand({"metrics": metrics[0], "chosen_by": [1, 2]})) == 2
    with pytest.raises(UnimetricError, match="`pi_ratio` is a structure metric"):
        expand({"metrics": metrics, "chosen_by": [1, 2]})


def test_overrides_replace_settings_of_tables(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text('epochs = 3\n[[method]]\nloss = "margin"\n[[method]]\nloss = "triplet"\nepochs = 5\nbatch_size = 56\n')
    assert [run.config.epochs for run in read_grid(path)] == [3, 5]
    runs = read_grid(path, epochs=1, batch_size=112)
    assert [(run.config.epochs, run.config.batch_size) for run in runs] == [(1, 112), (1, 112)]
    assert [(run.labels["epochs"], run.config.epochs) for run in read_grid(path, epochs=[1, 2])] == [("1", 1), ("2", 2)] * 2


def test_expand_lists_duplicate_runs_once() -> None:
    runs = expand({"setting": [{"name": "a", "batch_size": [56, 112]}, {"name": "b", "epochs": [10, 20]}]})
    assert [run.labels for run in runs] == [
        {"setting": "a", "batch_size": "56"},
        {"setting": "a", "batch_size": "112"},
        {"setting": "b", "epochs": "20"},
    ]


def test_config_of_a_run_is_a_grid_of_one_run(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    for others in ((), ("glyphs", "glyphs(size=24)")):
        path.write_text(from_settings({"watch_datasets": others}, "here").dump())
        assert [run.config.watch_datasets for run in read_grid(path)] == [others]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed = []", "`seed` must have at least one value"),
        ("sede = [0, 1]", "unknown key `sede`"),
        ("loss = ['margin', 'margn']", "no `margn` in losses"),
        ("method = [{loss = 'margin', epoch = 3}]", "unknown key `epoch`"),
        ("seed = [0, 1", "not TOML"),
    ],
)
def test_read_grid_rejects_invalid_files(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    with pytest.raises(UnimetricError) as refused:
        read_grid(path)
    assert says in refused.value.message
    assert refused.value.message.startswith(str(path))
    assert refused.value.hint


def test_check_runs_names_invalid_combination() -> None:
    runs = expand({"loss": ["margin", "circle"], "miner": "semihard"})
    with pytest.raises(UnimetricError, match="grid: circle: the loss Circle reads Pairs"):
        check_runs(runs, "grid")


def test_overrides_apply_to_every_run(grid: Path) -> None:
    runs = read_grid(grid, epochs=3, seed=7)
    assert {(run.config.epochs, run.config.seed) for run in runs} == {(3, 7)}
    assert len(runs) == 4


def test_shipped_studies_fit_and_count_their_runs() -> None:
    """Their networks are built by `make check`."""
    assert len(GRIDS) > 30
    for path in GRIDS:
        assert is_grid(path), path
        runs = read_any(path)
        check_runs(runs, path.name, build=False)
        head = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
        if "[search]" not in path.read_text():
            assert int(re.search(r"^# (\d+) runs, about", head, re.M)[1]) == len(runs), path  # type: ignore[index]
        assert re.search(r"et al\. 20\d\d|Not from a paper", head), path
        assert "GPU" in head, path


def test_expand_rejects_conflicting_settings() -> None:
    with pytest.raises(UnimetricError, match="`clip_norm` cannot clip"):
        expand({"precision": ["32-true", "16-mixed"], "clip_norm": [0.0, 1.0]})


def test_long_axes_are_counted_without_listing_them(tmp_path: Path) -> None:
    axes = {
        "seed": list(range(1000)),
        "epochs": list(range(1, 1001)),
        "batch_size": list(range(2, 1002)),
        "checkpoint_every": list(range(1, 1001)),
    }
    begun = time.monotonic()
    with pytest.raises(UnimetricError, match="at most 10,000 combinations, got 1,000,000,000,000: 1,000 of `seed` x 1,000 of `epochs`"):
        expand(axes, "grid")
    (tmp_path / "grid.toml").write_text("".join(f"{key} = {value}\n" for key, value in axes.items()))
    with pytest.raises(UnimetricError, match="at most 10,000 combinations"):
        read_any(tmp_path / "grid.toml")
    assert time.monotonic() - begun < 5


def test_lists_in_tables_are_counted() -> None:
    rows = [{"name": str(number), "seed": list(range(200)), "epochs": list(range(1, 101))} for number in range(3)]
    with pytest.raises(UnimetricError, match="got 60,000: 60,000 of `method`"):
        expand({"method": rows}, "grid")
    assert len(expand({"method": [{"name": "a", "seed": [0, 1]}, {"name": "b", "seed": 2}]}, "grid")) == 3
