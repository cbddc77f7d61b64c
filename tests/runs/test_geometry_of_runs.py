"""The geometry in which embeddings of a run are compared: the loss's own, or the one of the setting `geometry`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import changed

from unimetric.analysis import ensemble as ensembles
from unimetric.analysis import evaluate as evaluations
from unimetric.analysis import gallery as looks
from unimetric.analysis.ensemble import ensemble
from unimetric.analysis.evaluate import evaluate, evaluate_file
from unimetric.analysis.shift import points_of_features
from unimetric.analysis.transfer import transfer
from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.images.table import Table
from unimetric.metrics import Space, measure
from unimetric.runs import embed
from unimetric.runs.rows import read_table
from unimetric.spec import create
from unimetric.training import state as stages
from unimetric.training.build import check_fit
from unimetric.training.loop import train

RAW = ("n_pair", "angular", "generalized_lifted")


def vectors(labels: np.ndarray, dim: int = 8) -> torch.Tensor:
    """Directions that tell the classes apart, with lengths that do not: cosine and L2 rank the neighbors differently."""
    torch.manual_seed(0)
    centers = torch.randn(int(labels.max()) + 1, dim)[torch.from_numpy(labels)]
    return (centers + 0.5 * torch.randn(len(labels), dim)) * (2 * torch.randn(len(labels), 1)).exp()


def recalls(points: torch.Tensor, labels: np.ndarray) -> dict[str, float]:
    """Recall@1 by brute force, by geometry."""
    unit = torch.nn.functional.normalize(points.double(), dim=1)
    distance = {"cosine": -unit @ unit.T, "euclidean": torch.cdist(points.double(), points.double()), "inner": -points @ points.T}
    classes = torch.from_numpy(labels)
    return {
        name: (classes[matrix.fill_diagonal_(torch.inf).argmin(1)] == classes).double().mean().item() for name, matrix in distance.items()
    }


@pytest.fixture
def fixed(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Every network embeds the test images as these vectors; their recall@1, by geometry."""
    table, split = read_table(config)
    points = vectors(table.labels[split.test])

    def embed_all(*_: Any, **__: Any) -> torch.Tensor:
        return points.clone()

    for module in (evaluations, ensembles, looks):
        monkeypatch.setattr(module, "embed_all", embed_all)
    expected = recalls(points, table.labels[split.test])
    assert len({round(value, 3) for value in expected.values()}) == 3
    return expected


@pytest.mark.parametrize("loss", RAW)
def test_losses_on_raw_vectors_are_evaluated_by_l2(config: RunConfig, fixed: dict[str, float], loss: str) -> None:
    found = evaluate(changed(config, loss=loss))["recall(k=1)"]
    assert found == pytest.approx(fixed["euclidean"])
    inside = changed(config, objective=f"s2sd(loss='{loss}', dims=(8,))")
    assert evaluate(inside)["recall(k=1)"] == pytest.approx(fixed["euclidean"])


@pytest.mark.parametrize("loss", ["n_pair", "margin", "hyperbolic"])
@pytest.mark.parametrize("geometry", ["cosine", "euclidean", "inner"])
def test_setting_replaces_the_geometry_of_the_loss(config: RunConfig, fixed: dict[str, float], loss: str, geometry: str) -> None:
    assert evaluate(changed(config, loss=loss, geometry=geometry))["recall(k=1)"] == pytest.approx(fixed[geometry])
    assert evaluate(changed(config, loss=loss), geometry=geometry)["recall(k=1)"] == pytest.approx(fixed[geometry])


def test_other_losses_are_evaluated_by_cosine(config: RunConfig, fixed: dict[str, float]) -> None:
    assert evaluate(changed(config, loss="margin"))["recall(k=1)"] == pytest.approx(fixed["cosine"])
    assert evaluate(changed(config, loss="hyperbolic(curvature=0)"))["recall(k=1)"] == pytest.approx(fixed["cosine"])


def test_poincare_needs_a_curvature(config: RunConfig, tmp_path: Path) -> None:
    for loss in ("margin", "n_pair", "hyperbolic(curvature=0)"):
        wrong = changed(config, loss=loss, geometry="poincare")
        for use in (evaluate, lambda config: train(config, tmp_path / "run", quiet=True), lambda config: check_fit(config, "x")):
            with pytest.raises(UnimetricError, match="requires a loss with a curvature"):
                use(wrong)
    ball = changed(config, loss="hyperbolic(curvature=0.5)", metrics=["map_at_r"])
    assert evaluate(ball, geometry="poincare") == evaluate(ball) != evaluate(ball, geometry="euclidean")


def test_run_is_evaluated_in_one_geometry_everywhere(config: RunConfig, tmp_path: Path) -> None:
    config = changed(config, loss="n_pair", epochs=1, metrics=["map_at_r"])
    by = {"": train(config, tmp_path / "own", quiet=True)["test/map_at_r"]}
    by["cosine"] = train(changed(config, geometry="cosine"), tmp_path / "cosine", quiet=True)["test/map_at_r"]
    evaluate(tmp_path / "own", save=tmp_path / "points.npz")
    with np.load(tmp_path / "points.npz") as file:
        points, labels = file["embeddings"], file["labels"]
    assert by[""] == pytest.approx(measure(Space(points, labels, geometry="euclidean"), ["map_at_r"])["map_at_r"])
    assert by["cosine"] == pytest.approx(measure(Space(points, labels), ["map_at_r"])["map_at_r"])
    assert abs(by[""] - by["cosine"]) > 1e-3
    for geometry, value in by.items():
        assert evaluate(tmp_path / "own", geometry=geometry)["map_at_r"] == pytest.approx(value)
        assert transfer([tmp_path / "own"], [config.dataset], geometry=geometry)[0]["map_at_r"] == pytest.approx(value)
    assert evaluate(tmp_path / "cosine")["map_at_r"] == pytest.approx(by["cosine"])
    assert evaluate(tmp_path / "cosine", geometry="")["map_at_r"] == pytest.approx(by[""])
    for geometry, name in (("euclidean", ""), ("cosine", "cosine"), ("", "")):  # the file names its own geometry
        assert evaluate_file(tmp_path / "points.npz", metrics=["map_at_r"], geometry=geometry)["map_at_r"] == pytest.approx(by[name])
    with pytest.raises(UnimetricError, match="requires a loss with a curvature"):
        evaluate_file(tmp_path / "points.npz", geometry="poincare")


@pytest.mark.parametrize(("objective", "name"), [("diva(auxiliary='n_pair', intra_triplets='permuted', queue=1)", ""), ("plain", "NPair")])
def test_loss_of_the_embedding_decides_and_not_an_auxiliary(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str, name: str
) -> None:
    losses = []

    def space_of(*inputs: Any, **options: Any) -> Space:
        if options:  # those of the raw backbone have no loss
            losses.append(options["loss"])
        return embed.space_of(*inputs, **options)

    monkeypatch.setattr(stages, "space_of", space_of)
    loss = "n_pair" if name else "margin"
    train(changed(config, head="diva(dim=8)", objective=objective, loss=loss, epochs=1), tmp_path / "run", quiet=True)
    assert losses and {type(loss).__name__ if loss is not None else "" for loss in losses} == {name}


def test_ensemble_uses_the_geometry_of_its_runs(config: RunConfig, fixed: dict[str, float], tmp_path: Path) -> None:
    config = changed(config, epochs=1, evaluate_every=0)
    train(config, tmp_path / "own", quiet=True)
    train(changed(config, geometry="euclidean"), tmp_path / "l2", quiet=True)
    table, split = read_table(config)
    labels = table.labels[split.test]
    points = torch.nn.functional.normalize(vectors(labels), dim=1)
    half = points * torch.rand(len(points), 1, generator=torch.Generator().manual_seed(1))  # as a mean of two runs that differ
    expected = recalls(half, labels)
    assert expected["euclidean"] != expected["cosine"] != expected["inner"]

    run, others = tmp_path / "own", [points, 2 * half - points]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ensembles.functional, "normalize", lambda tensor, **_: tensor)
        for name, overrides in (("inner", {}), ("euclidean", {"geometry": "euclidean"}), ("cosine", {"geometry": "cosine"})):
            queue = iter(others)
            patch.setattr(ensembles, "embed_all", lambda *_, queue=queue, **__: next(queue))
            assert ensemble([run, run], metrics=["recall(k=1)"], **overrides)["recall(k=1)"] == pytest.approx(expected[name])
    with pytest.raises(UnimetricError, match="`geometry` must be '' as in"):
        ensemble([run, tmp_path / "l2"], metrics=["recall(k=1)"])
    with pytest.raises(UnimetricError, match="requires a loss with a curvature"):
        ensemble([run], metrics=["recall(k=1)"], geometry="poincare")
    assert ensemble([tmp_path / "l2"], metrics=["recall(k=1)"])["recall(k=1)"] == pytest.approx(fixed["cosine"])  # unit vectors


def test_ensemble_of_hyperbolic_runs_is_in_the_ball(config: RunConfig, tmp_path: Path) -> None:
    for seed in (0, 1):
        train(changed(config, epochs=1, evaluate_every=0, loss="hyperbolic(curvature=0.5)", seed=seed), tmp_path / str(seed), quiet=True)
    metrics = ["map_at_r", "recall(k=1)"]
    one = ensemble([tmp_path / "0"], metrics=metrics)
    assert one == pytest.approx(evaluate(tmp_path / "0", metrics=metrics), abs=1e-6)  # the mean of one run is the run
    both = {
        geometry: ensemble([tmp_path / "0", tmp_path / "1"], metrics=metrics, geometry=geometry) for geometry in ("", "poincare", "cosine")
    }
    assert both[""] == both["poincare"] != both["cosine"]


def test_gallery_of_a_report_has_the_neighbors_of_the_geometry(config: RunConfig, fixed: dict[str, float], tmp_path: Path) -> None:
    settings = {"loss": "n_pair", "epochs": 1, "evaluate_every": 0}
    for folder, geometry, name in (("own", "", "euclidean"), ("cosine", "cosine", "cosine")):
        train(changed(config, geometry=geometry, **settings), tmp_path / folder, quiet=True)
        count = len(read_table(config)[1].test)
        with np.load(looks.write_gallery(tmp_path / folder, queries=count, points=count, neighbours=1)) as file:
            labels, queries, near = file["labels"], file["queries"], file["neighbours"][:, 0]
        assert (labels[queries] == labels[near]).mean() == pytest.approx(fixed[name])


def test_shift_of_features_uses_the_geometry(tmp_path: Path) -> None:
    labels = np.repeat(np.arange(8), 6)
    names = tuple(f"class {number}" for number in range(8))
    table = Table(tuple(f"{row}.png" for row in range(48)), labels, names, labels < 4)
    points = vectors(labels)
    np.savez(tmp_path / "f.npz", embeddings=points.numpy(), labels=labels)
    (tmp_path / "splits.json").write_text(json.dumps({"1": {"train": list(names[:4]), "test": list(names[4:]), "fid": 1.0}}))
    expected = recalls(points[24:], labels[24:])
    assert expected["cosine"] != expected["euclidean"]
    for geometry, name in (("", "cosine"), ("euclidean", "euclidean")):
        found = points_of_features(tmp_path / "f.npz", table, str(tmp_path / "splits.json"), ["recall(k=1)"], geometry=geometry)
        assert found["1"][0]["recall(k=1)"] == pytest.approx(expected[name])


@pytest.mark.parametrize("loss", RAW)
def test_raw_losses_declare_the_euclidean_geometry(loss: str) -> None:
    embeddings = 7 * torch.randn(5, 3)
    points, options = create("losses", loss).placed(embeddings)
    assert torch.equal(points, embeddings) and options == {"geometry": "euclidean"}
