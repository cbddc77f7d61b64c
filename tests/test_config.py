"""Settings: from a file, from the command line, into a run id."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from unimetric.config import RunConfig, better, find_config, load, override, score
from unimetric.errors import UnimetricError
from unimetric.spec import find, names, signature

CONFIGS = sorted((Path(__file__).parents[1] / "src" / "unimetric" / "configs").glob("*.toml"))


def refused(**settings: object) -> str:
    with pytest.raises(UnimetricError) as caught:
        load(**settings)
    return str(caught.value)


def test_a_dump_loads_as_itself(tmp_path: Path) -> None:
    config = load(loss="margin(beta=0.6)", metrics=["recall(k=2)", "nmi"], clip_norm=1, dataset="folder(root='a \"b\" \\\\ ü\x7f')")
    (tmp_path / "a.toml").write_text(config.dump(), encoding="utf-8")
    assert load(tmp_path / "a.toml") == config


def test_the_run_id_counts_what_changes_the_result_and_nothing_else() -> None:
    assert load().run_id == load(device="cpu", workers=7, logger="none").run_id
    assert load().run_id != load(seed=1).run_id
    assert load(metrics=["recall", "nmi"]).run_id != load(metrics=["recall", "nmi"], chosen_by=2).run_id
    assert load(clip_norm=1).run_id == load(clip_norm=1.0).run_id
    assert load(clip_norm=0.0).run_id == load(clip_norm=-0.0).run_id


def test_run_ids_of_older_settings_stay() -> None:
    """Computed before `geometry` was a setting."""
    assert load(seed=3).run_id == "6c136cce50ef"
    assert load(loss="n_pair").run_id == "47cac9c27682"
    assert load(loss="n_pair", geometry="cosine").run_id != load(loss="n_pair").run_id


def test_geometry_is_a_name_that_spaces_have() -> None:
    from unimetric.geometry.space import GEOMETRIES

    for name in ("", *GEOMETRIES):
        assert load(geometry=name).geometry == name
    assert "`geometry` must be one of \"\", `cosine`, `euclidean`, `inner`, `poincare`, got 'hyperbolic'" in refused(geometry="hyperbolic")


@pytest.mark.parametrize("key", ["clip_norm", "clip_value"])
def test_float16_cannot_be_clipped(key: str) -> None:
    load(**{key: 1.0, "precision": "bf16-mixed"})
    with pytest.raises(UnimetricError, match=f"`{key}` cannot clip"):
        load(**{key: 1.0, "precision": "16-mixed"})


def test_every_mistake_says_what_to_type(tmp_path: Path) -> None:
    assert "did you mean `epochs`?" in refused(epoch=3)
    assert "must be an integer, got '3'" in refused(epochs="3")
    assert "must be true or false" in refused(compile=1)
    assert "at least 1" in refused(epochs=0)
    assert "`on_bad_picture` must be one of `error`, `skip`, got 'ignore'" in refused(on_bad_picture="ignore")
    assert "`chosen_by` is 2, but there are 1 metrics" in refused(chosen_by=2)
    assert "settings: loss: `margin` has no argument `bata`" in refused(loss="margin(bata=1)")
    assert "settings: metrics: no `recal`" in refused(metrics=["recal(k=1)"])
    with pytest.raises(UnimetricError, match="no such file"):
        load(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("epochs = ")
    with pytest.raises(UnimetricError, match=r"bad\.toml: not TOML"):
        load(tmp_path / "bad.toml")


@pytest.mark.parametrize("name", names("transforms"))
def test_a_picture_has_a_pixel_at_least(name: str) -> None:
    keys = {"size", "resize"} & signature(find("transforms", name)).parameters.keys()
    assert "size" in keys
    for key in keys:
        for pixels in (0, -3):
            says = refused(transform=f"{name}({key}={pixels})")
            assert f"settings: transform: `{key}` must be at least 1, got {pixels} in" in says
            assert f"hint: the default is `{key}=" in says


def test_what_only_describes_a_space_chooses_no_epoch() -> None:
    for text in ("spectral_decay(drop_largest=0)", "harmonic(metric='pi_ratio')"):
        says = refused(metrics=[text, "recall"])
        assert f"settings: metrics: `{text}` is a structure metric" in says and "such as `recall(k=1)`" in says
        assert load(metrics=["recall", text, "nmi"]).metrics[1] == text
        assert "or lower `chosen_by`" in refused(metrics=["recall", text, "nmi"], chosen_by=2)
    assert "settings: metrics: no `recal`" in refused(metrics=["per_source(metric='recal')"])


def test_an_epoch_is_scored_by_what_its_metrics_call_better(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "distant.py").write_text("def error(space): ...\n\ndef odd(space): ...\n\nerror.better, odd.better = 'lower', 'less'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("UNIMETRIC_TRUST", "distant")
    line = {"test/recall": 0.5, "test/recall(k=2)": 9.0, "test/per_source/a": 0.25, "test/per_source/b": 0.75, "test/distant.error": 2.0}
    line |= {"validation/recall": 0.125, "test/nmi": math.nan}
    assert score(["recall"], line, "test") == 0.5
    assert score(["recall"], line, "validation") == 0.125
    assert score(["distant.error", "per_source"], line, "test") == -1.5
    assert score(["nmi"], line, "test") == -math.inf
    assert better("per_source(metric='distant.error')") == "lower"
    assert "`better` of `distant.odd` must be 'higher', 'lower' or 'neither', got 'less'" in refused(metrics=["distant.odd"])


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
    assert f"unimetric train {path.stem}" in path.read_text()


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 3000])
def test_a_value_that_toml_cannot_hold_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(UnimetricError, match="cannot read `seed="):
        override(f"seed={value}")
    (tmp_path / "a.toml").write_text(f"seed = {value}")
    with pytest.raises(UnimetricError, match="not TOML"):
        load(tmp_path / "a.toml")


def test_a_word_is_one_setting() -> None:
    with pytest.raises(UnimetricError, match="must be one line"):
        override("seed=3\nepochs=5")


@pytest.mark.parametrize("key", ["batch_size", "workers", "seed"])
def test_numbers_that_no_machine_bears(key: str) -> None:
    assert f"`{key}` must be from " in refused(**{key: 10**14})


def test_configs_of_the_package_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = next(path for path in CONFIGS if path.stem == "glyphs_margin")
    assert load("glyphs_margin") == load(path)
    assert find_config("glyphs_losses").parent.name == "studies"
    (tmp_path / "glyphs_margin").write_text("epochs = 17\n")  # a file that is there comes first
    assert load("glyphs_margin").epochs == 17
    assert find_config("glyphs_margin.toml") == Path("glyphs_margin.toml")


def test_a_config_that_is_not_there_gets_a_hint() -> None:
    for path, says in (
        ("configs/glyphs_margin.toml", "write `glyphs_margin`"),
        ("configs/grids/glyphs_losses.toml", "write `glyphs_losses`"),
        ("glyphs_margn", "did you mean `glyphs_margin`?"),
        ("nowhere/xyz.toml", "to start from"),
    ):
        with pytest.raises(UnimetricError) as error:
            load(path)
        assert f"{path}: no such file" in error.value.message and says in error.value.hint
