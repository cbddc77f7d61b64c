"""k-reciprocal re-ranking against the paper's own steps, with whole (N, N) matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unimetric.errors import UnimetricError
from unimetric.geometry.rerank import reranked
from unimetric.metrics import Space, measure


def slowly(points: np.ndarray, k1: int, k2: int, weight: float) -> np.ndarray:
    """The final distance of every two pictures (Zhong et al., CVPR 2017, eqs. 2 to 12)."""
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    distance = np.clip(2 - 2 * unit @ unit.T, 0, None)
    np.fill_diagonal(distance, -1)  # itself first, whatever the rounding
    order = np.argsort(distance, 1, kind="stable")
    np.fill_diagonal(distance, 0)
    distance = distance / distance.max(1, keepdims=True)

    def reciprocal(i: int, k: int) -> set[int]:
        return {int(j) for j in order[i, : k + 1] if i in order[j, : k + 1]}

    count = len(points)
    encoded = np.zeros((count, count))
    for i in range(count):
        members = reciprocal(i, k1)
        for j in reciprocal(i, k1):
            theirs = reciprocal(j, round(k1 / 2))
            if 3 * len(theirs & reciprocal(i, k1)) > 2 * len(theirs):
                members = members | theirs
        for j in members:
            encoded[i, j] = np.exp(-distance[i, j])
        encoded[i] /= encoded[i].sum()
    encoded = np.stack([encoded[order[i, :k2]].mean(0) for i in range(count)])
    jaccard = np.array([[1 - np.minimum(a, b).sum() / np.maximum(a, b).sum() for b in encoded] for a in encoded])
    return (1 - weight) * jaccard + weight * distance


@pytest.mark.parametrize("memory", [1 << 29, 1 << 14])
@pytest.mark.parametrize(("k1", "k2", "weight"), [(8, 3, 0.3), (5, 1, 0.0), (12, 6, 0.7)])
def test_the_order_is_the_papers(crowd, k1, k2, weight, memory):
    embeddings, labels = crowd(pictures=70)
    space = reranked(Space(embeddings, labels, memory=memory), k1=k1, k2=k2, weight=weight, depth=69)
    final = slowly(embeddings.numpy(), k1, k2, weight)
    near = space.neighbors(69).numpy()
    ours = np.take_along_axis(final, near, 1)
    assert np.all(np.diff(ours, axis=1) > -1e-9)  # equal distances may stand in either order
    assert all(row not in found for row, found in enumerate(near))


def test_only_the_first_neighbours_are_put_in_order(crowd):
    embeddings, labels = crowd(pictures=70)
    query, gallery = np.arange(70) < 30, np.arange(70) >= 20
    plain = Space(embeddings, labels, query, gallery)
    before, after = plain.neighbors(50), reranked(plain, k1=8, k2=3, depth=20).neighbors(50)
    assert torch.equal(before[:, 20:], after[:, 20:])
    assert torch.equal(before[:, :20].sort().values, after[:, :20].sort().values)
    assert not torch.equal(before, after)
    assert torch.equal(reranked(plain, k1=8, k2=3, depth=20).neighbors(5), after[:, :5])


@pytest.mark.parametrize("geometry", ["cosine", "euclidean", "poincare"])
def test_weight_one_changes_nothing(crowd, geometry):
    space = Space(*crowd(), geometry=geometry)
    assert torch.equal(space.neighbors(30), reranked(space, k1=8, k2=3, weight=1.0, depth=30).neighbors(30))


def test_it_helps_where_classes_hang_together(crowd):
    space = Space(*crowd(pictures=400, classes=20, dim=12))
    texts = ["recall", "map_at_r"]
    before, after = measure(space, texts), measure(reranked(space), texts)
    assert after["map_at_r"] > before["map_at_r"]


def test_it_refuses_more_neighbours_than_pictures(crowd):
    with pytest.raises(UnimetricError, match="the 60 nearest others of each image, but there are only 60 images") as refused:
        reranked(Space(*crowd(pictures=60)), k1=60)
    assert "evaluate at least 61 images" in refused.value.hint
    with pytest.raises(UnimetricError, match="k1=5 and k2=6") as refused:
        reranked(Space(*crowd(pictures=60)), k1=5)
    assert "k2 <= k1" in refused.value.hint
    embeddings, labels = crowd(pictures=21)
    assert reranked(Space(embeddings, labels)).neighbors(1).shape == (21, 1)


def test_it_refuses_inner_products(crowd):
    with pytest.raises(UnimetricError, match="distances"):
        reranked(Space(*crowd(), geometry="inner"))


def test_each_dataset_alone_is_put_in_order(crowd):
    """As if the other datasets were not there: `per_source` and `harmonic` once dropped the new order."""
    embeddings, labels = crowd(pictures=120)
    source = torch.arange(120) % 2
    space = reranked(Space(embeddings, labels, source=source), k1=8, k2=3)
    alone = [measure(reranked(Space(embeddings[source == n], labels[source == n]), k1=8, k2=3), ["map_at_r"])["map_at_r"] for n in (0, 1)]
    assert alone != [measure(Space(embeddings[source == n], labels[source == n]), ["map_at_r"])["map_at_r"] for n in (0, 1)]
    assert list(measure(space, ["per_source(metric='map_at_r')"]).values()) == pytest.approx(alone)


def test_a_dataset_too_small_to_be_put_in_order_is_refused(crowd):
    embeddings, labels = crowd(pictures=70)
    space = reranked(Space(embeddings, labels, source=(torch.arange(70) < 62).long()), k1=8, k2=3)
    with pytest.raises(UnimetricError, match="there are only 8 images"):
        measure(space, ["per_source"])
