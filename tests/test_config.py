"""Settings: from a file, from the command line, into a run id."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from unimetric.config import RunConfig, load, override
from unimetric.errors import UnimetricError

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


def refused(**settings: object) -> str:
    with pytest.raises(UnimetricError) as caught:
        load(**settings)
    return str(caught.value)


def test_a_dump_loads_as_itself(tmp_path: Path) -> None:
    config = load(loss="margin(beta=0.6)", metrics=["recall(k=2)", "nmi"], clip_norm=1, dataset="folder(root='a \"b\" \\\\ ü')")
    (tmp_path / "a.toml").write_text(config.dump(), encoding="utf-8")
    assert load(tmp_path / "a.toml") == config


def test_the_run_id_counts_what_changes_the_result_and_nothing_else() -> None:
    assert load().run_id == load(device="cpu", workers=7, logger="none").run_id
    assert load().run_id != load(seed=1).run_id
    assert load(metrics=["recall", "nmi"]).run_id != load(metrics=["recall", "nmi"], chosen_by=2).run_id
    assert load(clip_norm=1).run_id == load(clip_norm=1.0).run_id


def test_every_mistake_says_what_to_type(tmp_path: Path) -> None:
    assert "did you mean `epochs`?" in refused(epoch=3)
    assert "must be a whole number" in refused(epochs="3")
    assert "must be true or false" in refused(compile=1)
    assert "at least 1" in refused(epochs=0)
    assert "choose from: error, skip" in refused(on_bad_picture="ignore")
    assert "`chosen_by` is 2, but there are 1 metrics" in refused(chosen_by=2)
    assert "settings: loss: `margin` has no argument `bata`" in refused(loss="margin(bata=1)")
    assert "settings: metrics: no `recal`" in refused(metrics=["recal(k=1)"])
    with pytest.raises(UnimetricError, match="no such file"):
        load(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("epochs = ")
    with pytest.raises(UnimetricError, match=r"bad\.toml: not TOML"):
        load(tmp_path / "bad.toml")


def test_settings_of_the_command_line() -> None:
    assert override("metrics=['recall(k=1)', 'nmi']") == ("metrics", ["recall(k=1)", "nmi"])
    assert override("compile=true") == ("compile", True)
    assert override("miner=") == ("miner", "")
    with pytest.raises(UnimetricError, match="key=value"):
        override("seed")


def test_settings_need_no_torch() -> None:
    code = "import sys; from unimetric.config import RunConfig; import unimetric; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_names_its_command(path: Path) -> None:
    assert isinstance(load(path), RunConfig)
    assert f"unimetric train configs/{path.name}" in path.read_text()
