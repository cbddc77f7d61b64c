"""Embeddings of fewer dimensions and bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unimetric.analysis.compressed import compress, round_to
from unimetric.analysis.evaluate import evaluate
from unimetric.config import RunConfig
from unimetric.errors import UnimetricError
from unimetric.geometry.space import Space
from unimetric.metrics import measure


def test_smaller_embeddings_are_named_and_rounded() -> None:
    points = torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
    found = dict(compress(points, [4, 8], ["int8", "binary"]))
    assert list(found) == ["int8", "binary", "dim=4", "dim=4, int8", "dim=4, binary", "dim=8", "dim=8, int8", "dim=8, binary"]
    unit = points[:, :8] / np.linalg.norm(points[:, :8].numpy(), axis=1, keepdims=True)
    torch.testing.assert_close(found["dim=8"], unit)
    levels = found["dim=8, int8"] / found["dim=8, int8"].abs().amax(1, keepdim=True) * 127
    torch.testing.assert_close(levels, levels.round(), atol=1e-4, rtol=0)
    assert 0 < (found["dim=8, int8"] - unit).abs().max() <= 0.5 / 127 + 1e-6
    assert set(found["binary"].unique().tolist()) == {-1.0, 1.0} and torch.equal(found["binary"] > 0, points > 0)
    assert 0 < (round_to(points, "float16") - round_to(points, "float32")).abs().max() < 1e-3


@pytest.mark.parametrize("dim", [8, 20, 128])
def test_ties_of_binary_codes_go_to_the_lowest_row(dim: int) -> None:
    codes = round_to(torch.randn(600, dim, generator=torch.Generator().manual_seed(0)), "binary")
    scores = (codes @ codes.T).fill_diagonal_(-torch.inf)
    expected = scores.sort(dim=1, descending=True, stable=True).indices[:, :40]
    assert torch.equal(Space(codes, torch.arange(600) // 2).neighbors(40), expected)


def test_binary_warns_if_no_coordinate_is_negative(caplog: pytest.LogCaptureFixture) -> None:
    points = torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
    list(compress(points, [4], ["binary"]))
    list(compress(points.relu(), [4], ["int8"]))
    assert not caplog.records
    assert len(dict(compress(points.relu(), [4], ["binary"]))["binary"].unique(dim=0)) == 1
    assert len(caplog.records) == 1 and "`binary`" in caplog.text


def test_evaluate_reports_smaller_embeddings(config: RunConfig) -> None:
    numbers = evaluate(config, metrics=["recall(k=1)"], dims=[2], precisions=["binary"])
    assert list(numbers) == [f"recall(k=1){name}" for name in ("", "/binary", "/dim=2", "/dim=2, binary")]
    assert numbers["recall(k=1)/dim=2, binary"] < numbers["recall(k=1)"]


def test_values_are_those_of_the_smaller_embeddings(config: RunConfig, tmp_path) -> None:
    numbers = evaluate(config, metrics=["recall(k=1)"], dims=[3], save=tmp_path / "all.npz")
    arrays = np.load(tmp_path / "all.npz")
    space = Space(torch.from_numpy(arrays["embeddings"][:, :3]), torch.from_numpy(arrays["labels"]), geometry="cosine")
    assert numbers["recall(k=1)/dim=3"] == pytest.approx(measure(space, ["recall(k=1)"])["recall(k=1)"])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"dims": [0]}, "at least 1"),
        ({"dims": [9]}, "at most the dimension 8"),
        ({"precisions": ["int4"]}, "unknown precision `int4`"),
        ({"dims": [2], "geometry": "euclidean"}, "require cosine similarity, but the run has euclidean"),
        ({"precisions": ["int8"], "loss": "hyperbolic"}, "require cosine similarity, but the run has poincare"),
    ],
)
def test_rejects_invalid_compression(arguments: dict, problem: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unimetric.analysis.evaluate.embed_all", lambda *_, **__: pytest.fail("images were embedded"))
    with pytest.raises(UnimetricError, match=problem):
        evaluate(config, **arguments)
