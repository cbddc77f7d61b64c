"""The same numbers as pytorch-metric-learning and scikit-learn where they mean the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from sklearn.neighbors import NearestNeighbors

from unimetric.metrics import Space, measure

accuracy_calculator = pytest.importorskip("pytorch_metric_learning.utils.accuracy_calculator")


@pytest.mark.parametrize("pictures", [120, 700])
@pytest.mark.parametrize("protocol", ["everyone", "query and gallery"])
def test_accuracy_calculator(crowd, pictures, protocol):
    embeddings, labels = crowd(pictures=pictures, classes=12)
    embeddings = torch.nn.functional.normalize(embeddings, dim=1).float()
    names = ("precision_at_1", "r_precision", "mean_average_precision_at_r", "mean_average_precision", "mean_reciprocal_rank")
    everyone = protocol == "everyone"
    query = torch.ones(pictures, dtype=torch.bool) if everyone else torch.arange(pictures) % 3 == 0
    gallery = torch.ones(pictures, dtype=torch.bool) if everyone else ~query
    answering = () if everyone else (embeddings[gallery], labels[gallery])
    for k in ("max_bin_count", 20):
        calculator = accuracy_calculator.AccuracyCalculator(include=names, k=k, device=torch.device("cpu"))
        theirs = calculator.get_accuracy(embeddings[query], labels[query], *answering)
        space = Space(embeddings, labels, query, gallery)
        ours = measure(space, ["recall(k=1)", "r_precision", "map_at_r", "map_at_k(k=20, divide='relevant')", "mrr(k=20)"])
        assert ours["recall(k=1)"] == pytest.approx(theirs["precision_at_1"], abs=1e-9)
        if k == "max_bin_count":  # with a smaller k their R-metrics are cut off
            assert ours["r_precision"] == pytest.approx(theirs["r_precision"], abs=1e-6)
            assert ours["map_at_r"] == pytest.approx(theirs["mean_average_precision_at_r"], abs=1e-6)
        else:
            assert ours["map_at_k(k=20, divide='relevant')"] == pytest.approx(theirs["mean_average_precision"], abs=1e-6)
            assert ours["mrr(k=20)"] == pytest.approx(theirs["mean_reciprocal_rank"], abs=1e-6)


@pytest.mark.parametrize("geometry", ["cosine", "euclidean"])
def test_neighbours_of_scikit_learn(crowd, geometry):
    embeddings, labels = crowd(pictures=400, dim=16)
    theirs = (
        NearestNeighbors(n_neighbors=11, metric=geometry, algorithm="brute").fit(embeddings).kneighbors(embeddings, return_distance=False)
    )
    assert np.array_equal(Space(embeddings, labels, geometry=geometry).neighbors(10).numpy(), theirs[:, 1:])


def test_average_precision_over_the_whole_gallery_is_scikit_learns(crowd):
    embeddings, labels = crowd(pictures=80)
    unit = torch.nn.functional.normalize(embeddings, dim=1)
    score = (unit @ unit.T).numpy()
    each = []
    for row in range(80):
        others = np.arange(80) != row
        each.append(average_precision_score(labels.numpy()[others] == int(labels[row]), score[row][others]))
    assert measure(Space(embeddings, labels), ["map_at_k(k=None)"])["map_at_k(k=None)"] == pytest.approx(np.mean(each), rel=1e-9)
