"""Universal metric learning end to end: eight scripts as eight datasets, one frozen network, and what is kept of a run."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.conftest import read_log
from typer.testing import CliRunner

from unimetric.analysis.adapt import adapt
from unimetric.analysis.ensemble import ensemble, select_runs
from unimetric.analysis.evaluate import evaluate
from unimetric.analysis.figures.imbalance import imbalance
from unimetric.analysis.figures.keep import keep_probability
from unimetric.analysis.figures.prompts import prompt_preference
from unimetric.cli import app
from unimetric.config import RunConfig, from_settings, load
from unimetric.deploy.export import export
from unimetric.errors import UnimetricError
from unimetric.images import packing
from unimetric.images.table import Table
from unimetric.runs.folder import open_run
from unimetric.runs.model import build_model
from unimetric.runs.rows import read_table
from unimetric.runs.weights import write_tensors
from unimetric.spec import create
from unimetric.training.loop import train

BLOCKS = ("latin", "greek", "cyrillic", "armenian", "georgian", "arrows", "operators", "shapes")


def contiguous(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights as safetensors stores them: a network in the channels-last layout is not contiguous."""
    return {key: value.contiguous() for key, value in network.state_dict().items()}


def few(table: Table, classes: int) -> Table:
    """So many classes to train on and to test on, of each dataset."""
    kept = []
    for source in range(len(table.source_names)):
        for train_ in (True, False):
            kept.append(np.unique(table.labels[(table.source == source) & (table.train == train_)])[:classes])
    return table.take(np.isin(table.labels, np.concatenate(kept)))


@pytest.fixture(scope="module")
def universe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of every block on each side, as a pack."""
    path = tmp_path_factory.mktemp("universe") / "universe.pack"
    packing.write(path, few(create("datasets", "glyphs"), 3), short_side=None, encoding="raw")
    return path


@pytest.fixture(scope="module")
def config(universe: Path) -> RunConfig:
    return load(
        dataset=f"pack(path='{universe}')",
        transform="glyphs(size=32)",
        backbone="timm(name='test_vit', image_size=32)",
        adapter="puma(rank=8, prompts=4, length=2)",
        head="linear(dim=16)",
        loss="curricularface(scale=32.0, margin=0.3, per_class_t=True, lr=0.1)",
        sampler="shuffle",
        optimizer="adamw(lr=3e-3)",
        metrics=["unified", "harmonic", "per_source"],
        batch_size=48,
        epochs=2,
        clip_value=1.0,
        logger="none",
        device="cpu",
    )


@pytest.fixture(scope="module")
def run(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "puma"
    train(config, folder, quiet=True)
    return folder


def test_eight_datasets_are_trained_and_measured_as_one(run: Path) -> None:
    first, *_, last = read_log(run)
    print(f"unified {last['test/unified']:.3f}, harmonic {last['test/harmonic']:.3f}, untrained {first['test/unified']:.3f}")
    each = [last[f"test/per_source/{block}"] for block in BLOCKS]
    assert last["test/harmonic"] == pytest.approx(8 / sum(1 / value for value in each))
    assert last["test/unified"] <= np.mean(each) + 0.05  # more to choose from, up to unequal numbers of pictures
    assert read_log(run)[1]["loss"] > last["loss"]
    assert [first[f"classes of {block}"] for block in BLOCKS] == [3] * 8
    assert all(first[f"pictures of {block}"] >= 24 for block in BLOCKS)
    assert evaluate(run)["unified"] == pytest.approx(max(line["test/unified"] for line in read_log(run)[1:]))


def test_only_what_is_trained_is_saved_and_the_rest_is_as_it_was(run: Path, config: RunConfig) -> None:
    fresh = build_model(config)
    learnt = {name for name, parameter in fresh.named_parameters() if parameter.requires_grad}
    saved = load_file(run / "model.safetensors")
    assert set(saved) == learnt | {"frozen.fingerprint"}
    kept = {key.removeprefix("model/") for key in load_file(run / "checkpoint.safetensors") if key.startswith("model/")}
    assert kept == set(saved)
    _, model = open_run(run)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, fresh.state_dict()[name]) == (name not in learnt), name


def test_a_killed_run_goes_on_bit_by_bit(run: Path, config: RunConfig, tmp_path: Path) -> None:
    """Also the adapters' dice."""
    train(from_settings(asdict(config) | {"epochs": 1}), tmp_path / "half", quiet=True)
    half = tmp_path / "half"
    (half / "done").unlink()
    (half / "config.toml").write_text(config.dump())
    train(config, half, quiet=True)
    one, two = load_file(run / "checkpoint.safetensors"), load_file(half / "checkpoint.safetensors")
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_another_backbone_is_refused(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "config.toml").write_text((copy / "config.toml").read_text().replace("seed = 0", "seed = 1"))  # other random weights
    with pytest.raises(UnimetricError, match=r"`seed` is 1, but model\.safetensors was trained with 0"):
        open_run(copy)
    write_tensors(copy / "model.safetensors", load_file(run / "model.safetensors"), {})  # as of a version that stores no settings
    with pytest.raises(UnimetricError, match="another backbone"):
        open_run(copy)
    tensors = load_file(run / "model.safetensors")
    del tensors["head.layer.bias"]
    save_file(tensors, copy / "model.safetensors", {"notes": "{}"})
    with pytest.raises(UnimetricError, match="another model"):
        (copy / "config.toml").write_text((run / "config.toml").read_text())
        open_run(copy)


def test_frozen_weights_may_lie_elsewhere(run: Path, config: RunConfig, tmp_path: Path) -> None:
    network = build_model(config).backbone.backbone.network
    save_file(contiguous(network), tmp_path / "same.safetensors")
    save_file({key: value + 1 for key, value in contiguous(network).items()}, tmp_path / "other.safetensors")
    text = "timm(name='test_vit', image_size=32, weights='{}')"
    same = evaluate(run, metrics=["unified"], backbone=text.format(tmp_path / "same.safetensors"))
    assert same == evaluate(run, metrics=["unified"])
    with pytest.raises(UnimetricError, match="another backbone"):
        evaluate(run, backbone=text.format(tmp_path / "other.safetensors"))


def test_what_is_written_beside_a_run_counts_for_every_verb(run: Path, config: RunConfig, tmp_path: Path) -> None:
    """An ensemble and few-shot adaptation once took the backbone of the run's own settings, and let another head pass unread."""
    network = build_model(config).backbone.backbone.network
    save_file({key: value + 1 for key, value in contiguous(network).items()}, tmp_path / "other.safetensors")
    backbone = f"timm(name='test_vit', image_size=32, weights='{tmp_path / 'other.safetensors'}')"
    for verb in (evaluate, lambda run, **overrides: ensemble([run], **overrides), adapt):
        with pytest.raises(UnimetricError, match="another backbone"):
            verb(run, backbone=backbone)
        with pytest.raises(UnimetricError, match="was trained with `head"):
            verb(run, head="linear(dim=4)")


@pytest.mark.parametrize("adapter", ["puma", "lora"])
def test_an_exported_run_needs_nothing_else(adapter: str, run: Path, config: RunConfig, tmp_path: Path) -> None:
    """The frozen weights come along; LoRA is no adapter any more."""
    if adapter == "lora":
        weights = tmp_path / "network.safetensors"
        save_file(contiguous(build_model(config).backbone.backbone.network), weights)
        backbone = f"timm(name='test_vit', image_size=32, weights='{weights}')"
        changed = from_settings(asdict(config) | {"adapter": "lora(rank=4)", "backbone": backbone, "epochs": 1})
        train(changed, tmp_path / "run", quiet=True)
    folder = run if adapter == "puma" else tmp_path / "run"
    done = CliRunner().invoke(app, ["export", str(folder), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        expected = open_run(folder)[1].eval()(images)[0]
        if adapter == "lora":
            weights.unlink()
        settings, model = open_run(tmp_path / "out")
        assert torch.allclose(model.eval()(images)[0], expected, rtol=1e-4, atol=1e-5)
    assert settings.adapter == ("" if adapter == "lora" else config.adapter)
    assert "weights" not in settings.backbone
    with pytest.raises(UnimetricError, match="must be an empty or new folder"):
        export(folder, tmp_path / "out")


def test_an_ensemble_averages_embeddings(run: Path, config: RunConfig, tmp_path: Path) -> None:
    assert ensemble([run, run]) == pytest.approx(evaluate(run, metrics=["unified", "harmonic", "per_source"]))
    other = from_settings(asdict(config) | {"seed": 1, "epochs": 1, "adapter": "linear_probe", "evaluate_every": 0})
    train(other, tmp_path / "other", quiet=True)
    both = ensemble([run, tmp_path / "other"], metrics=["unified"])["unified"]
    with np.load(_saved(run, tmp_path / "a.npz")) as a, np.load(_saved(tmp_path / "other", tmp_path / "b.npz")) as b:
        mean, labels = (_unit(a["embeddings"]) + _unit(b["embeddings"])) / 2, a["labels"]
    assert both == pytest.approx(_first_hits(mean, labels))
    cosine = ensemble([run, tmp_path / "other"], metrics=["unified"], normalise=True)["unified"]
    assert cosine == pytest.approx(_first_hits(_unit(mean), labels))
    narrow = from_settings(asdict(other) | {"head": "linear(dim=8)"})
    train(narrow, tmp_path / "narrow", quiet=True)
    with pytest.raises(UnimetricError, match="must have one dimension, got 8 and 16"):
        ensemble([run, tmp_path / "narrow"])


def test_an_ensemble_of_a_study_is_named_by_labels(run: Path, tmp_path: Path) -> None:
    study = tmp_path / "study"
    labels = {"a1": ("PA", "cub"), "a2": ("PA", "cars"), "b1": ("MS", "cub"), "b2": ("MS", "cars"), "b3": ("MS", "sop")}
    for name in ("a1", "a2", "b1", "b2"):
        shutil.copytree(run, study / name)
    named = {name: {"method": method, "dataset": dataset} for name, (method, dataset) in labels.items()}
    (study / "study.json").write_text(json.dumps(named))
    assert select_runs([study], {"method": ["PA"]}) == [study / "a1", study / "a2"]
    assert select_runs([run], {}) == [run]
    assert select_runs([study], {"method": ["MS", "PA"], "dataset": ["cars"]}) == [study / "a2", study / "b2"]
    out = tmp_path / "out.json"
    done = CliRunner().invoke(app, ["ensemble", str(study), "--label", "method=PA", "--metrics", "unified", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text()) == pytest.approx(ensemble([study / "a1", study / "a2"], metrics=["unified"]))
    for wanted, message, hint in (
        ({"method": ["PNCA"]}, "no run of the study has method PNCA", "MS, PA"),
        ({"methods": ["PA"]}, "no axis `methods`", "method"),
        ({"method": ["MS"]}, "1 of 3 runs with these labels are not finished, the first is b3", "unimetric bench"),
    ):
        with pytest.raises(UnimetricError, match=message) as raised:
            select_runs([study], wanted)
        assert hint in raised.value.hint
    with pytest.raises(UnimetricError, match="labels select runs of a study"):
        select_runs([run], {"method": ["PA"]})
    with pytest.raises(UnimetricError, match="must be `axis=label`, got `PA`"):
        CliRunner().invoke(app, ["ensemble", str(study), "--label", "PA"], catch_exceptions=False)


COUNTED = """
from dataclasses import replace
from unimetric.spec import create
from unimetric.splits.standard import standard

calls = []

def universe(*, path):
    calls.append("table")
    return create("datasets", f"pack(path={path!r})")

def without(table, *, first=0):
    calls.append("split")
    split = standard(table)
    return replace(split, test=split.test[first:])
"""


def test_an_ensemble_reads_once_and_refuses_other_pictures(
    run: Path, config: RunConfig, universe: Path, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "counted.py").write_text(COUNTED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("UNIMETRIC_TRUST", "counted")
    for name, settings in {"a": {}, "b": {"epochs": 3}, "c": {"split": "counted.without(first=1)"}}.items():
        shutil.copytree(run, tmp_path / name)
        common = {"dataset": f"counted.universe(path={str(universe)!r})", "split": "counted.without"}
        (tmp_path / name / "config.toml").write_text(from_settings(asdict(config) | common | settings).dump())
    import counted

    numbers = ensemble([tmp_path / "a", tmp_path / "b"])
    assert counted.calls == ["table", "split"]
    assert numbers == pytest.approx(evaluate(run))
    pictures = len(read_table(config)[1].test)
    with pytest.raises(UnimetricError) as refused:
        ensemble([tmp_path / "a", tmp_path / "b", tmp_path / "c"])
    assert f"{tmp_path / 'c'}: its {pictures - 1} `test` images" in refused.value.message
    assert f"are not the {pictures} of {tmp_path / 'a'} (`split = 'counted.without'`" in refused.value.message
    assert "`split=standard`" in refused.value.hint


def _unit(embeddings: np.ndarray) -> np.ndarray:
    return embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)


def _first_hits(points: np.ndarray, labels: np.ndarray) -> float:
    similarity = points @ points.T
    np.fill_diagonal(similarity, -2)
    return (labels[similarity.argmax(1)] == labels).mean()


def _saved(run: Path, path: Path) -> Path:
    evaluate(run, metrics=["unified"], save=path)
    return path


def test_figures(run: Path, config: RunConfig, tmp_path: Path) -> None:
    shares = prompt_preference(run, tmp_path / "prompts.png")
    assert shares.shape == (8, 4)
    assert (np.abs(shares) <= 1).all()
    assert np.ptp(shares, axis=0).max() > 0  # datasets differ
    sizes = imbalance(run, tmp_path / "imbalance.png")
    assert {name: len(each) for name, each in sizes.items()} == dict.fromkeys(BLOCKS, 3)
    found = keep_probability([run], tmp_path / "keep.png", metrics=["harmonic"])
    assert found == {
        0.5: {key.removeprefix("test/"): value for key, value in json.loads((run / "done").read_text()).items() if "test/" in key}
    }
    with pytest.raises(UnimetricError, match=r"another run also has `keep=0\.5`"):  # one of them would not be drawn
        keep_probability([run, run], tmp_path / "twice.png")
    with pytest.raises(UnimetricError, match="the run has no value of `harmonics`"):
        keep_probability([run], tmp_path / "twice.png", metrics=["harmonics"])
    assert not (tmp_path / "twice.png").exists()
    done = CliRunner().invoke(app, ["figure", "imbalance", str(run), "--out", str(tmp_path / "again.png")])
    assert done.exit_code == 0
    for name in ("prompts", "imbalance", "keep", "again"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UnimetricError, match="no `keep`"):
        shutil.copytree(run, tmp_path / "vpt")
        (tmp_path / "vpt" / "config.toml").write_text(from_settings(asdict(config) | {"adapter": "vpt"}).dump())
        keep_probability([tmp_path / "vpt"], tmp_path / "keep.png")


def test_prompt_figure_rejects_run_without_adapter(config: RunConfig, tmp_path: Path) -> None:
    train(from_settings(asdict(config) | {"adapter": "", "epochs": 1}), tmp_path / "run", quiet=True)
    with pytest.raises(UnimetricError, match="the adapter `none` has no prompt pool"):
        prompt_preference(tmp_path / "run", tmp_path / "prompts.png")
    assert not (tmp_path / "prompts.png").exists()


def test_puma_with_tokens_trains_and_has_no_pool(config: RunConfig, tmp_path: Path) -> None:
    changed = from_settings(asdict(config) | {"adapter": "puma(rank=8, length=2, pool='tokens', keep=1.0)", "epochs": 1})
    train(changed, tmp_path / "run", quiet=True)
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert saved["backbone.prompt.tokens"].shape == (1, 2, 64)
    assert not any("keys" in name for name in saved)
    assert evaluate(tmp_path / "run")["unified"] == pytest.approx(read_log(tmp_path / "run")[-1]["test/unified"])
    with pytest.raises(UnimetricError, match="has no prompt pool"):
        prompt_preference(tmp_path / "run", tmp_path / "prompts.png")


def test_prompts_are_of_the_pictures_that_can_be_read(run: Path, config: RunConfig, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(12):
        picture = tmp_path / "pictures" / f"class{number // 3}" / f"{number}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (36, 36, 3), dtype=np.uint8)).save(picture)
    picture.write_bytes(b"")  # of a class that is tested on
    shutil.copytree(run, tmp_path / "run")
    settings = asdict(config) | {"dataset": f"folder(root={str(tmp_path / 'pictures')!r})", "workers": 0}
    (tmp_path / "run" / "config.toml").write_text(from_settings(settings).dump())
    with pytest.raises(UnimetricError, match=str(picture)):
        prompt_preference(tmp_path / "run", tmp_path / "prompts.png")
    (tmp_path / "run" / "config.toml").write_text(from_settings(settings | {"on_bad_picture": "skip"}).dump())
    without = prompt_preference(tmp_path / "run", tmp_path / "prompts.png")
    picture.unlink()
    assert np.array_equal(without, prompt_preference(tmp_path / "run", tmp_path / "prompts.png"))
