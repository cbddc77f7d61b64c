"""NMI, AMI, F1 and the k-means below them."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score
from sklearn.metrics.cluster import pair_confusion_matrix

from unimetric.errors import UnimetricError
from unimetric.geometry.kmeans import kmeans, overlap
from unimetric.metrics import Space, measure


def naive_nmi(classes, clusters):
    total, joint = len(classes), Counter(zip(classes, clusters, strict=True))
    a, b = Counter(classes), Counter(clusters)
    information = sum(n / total * math.log(total * n / (a[i] * b[j])) for (i, j), n in joint.items())
    entropy = -sum(n / total * math.log(n / total) for counts in (a, b) for n in counts.values())
    return 2 * information / entropy


def naive_f1(classes, clusters):
    both = same_class = same_cluster = 0
    for i, j in itertools.combinations(range(len(classes)), 2):
        both += classes[i] == classes[j] and clusters[i] == clusters[j]
        same_class += classes[i] == classes[j]
        same_cluster += clusters[i] == clusters[j]
    precision, recall = both / same_cluster, both / same_class
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize("clusters", [None, 1, 3, 25])
@pytest.mark.parametrize("geometry", ["cosine", "poincare"])
def test_definition(crowd, clusters, geometry):
    space = Space(*crowd(pictures=80), geometry=geometry)
    found = space.clusters(k=clusters).tolist()
    classes = space.labels.tolist()
    measured = measure(space, [f"{name}(clusters={clusters})" for name in ("nmi", "ami", "f1")])
    nmi, ami, f1 = measured.values()
    assert math.isclose(nmi, naive_nmi(classes, found), rel_tol=1e-9, abs_tol=1e-12)
    assert math.isclose(nmi, normalized_mutual_info_score(classes, found), rel_tol=1e-9, abs_tol=1e-12)
    assert math.isclose(ami, adjusted_mutual_info_score(classes, found), rel_tol=1e-9, abs_tol=1e-9)
    assert math.isclose(f1, naive_f1(classes, found), rel_tol=1e-9)
    (_, only_cluster), (only_class, both) = pair_confusion_matrix(classes, found)
    assert math.isclose(f1, 2 * both / (2 * both + only_class + only_cluster), rel_tol=1e-9)


def test_ami_at_many_small_classes_is_scikit_learns():
    dice = torch.Generator().manual_seed(0)
    classes, clusters = torch.randint(0, 90, (400,), generator=dice), torch.randint(0, 70, (400,), generator=dice)
    table = overlap(classes, clusters)
    room = (table.entropy(table.classes) + table.entropy(table.clusters)) / 2 - table.chance()
    assert math.isclose((table.information() - table.chance()) / room, adjusted_mutual_info_score(classes, clusters), abs_tol=1e-9)


@pytest.mark.parametrize("labels", [torch.zeros(6, dtype=torch.int64), torch.arange(6)])
def test_one_class_or_all_alone_is_defined(labels):
    points = torch.eye(6)
    assert measure(Space(points, labels), ["nmi", "ami", "f1"]) == {"nmi": 1.0, "ami": 1.0, "f1": 1.0}


@pytest.mark.parametrize("seeding", ["random", "plusplus"])
def test_kmeans_assigns_to_the_nearest_and_never_gets_worse(crowd, seeding):
    points, _ = crowd(pictures=300, classes=30)
    objectives = []
    for iterations in (0, 1, 2, 5, 20):
        found = kmeans(points, 30, iterations=iterations, seeding=seeding)
        distance = torch.cdist(points, found.centers).square()
        assert torch.equal(found.cluster, distance.argmin(1))
        assert math.isclose(float(found.objective), float(distance.amin(1).sum()), rel_tol=1e-9)
        objectives.append(float(found.objective))
    assert objectives == sorted(objectives, reverse=True)


def test_kmeans_centres_are_means_at_rest(crowd):
    points, _ = crowd(pictures=200, classes=8)
    found = kmeans(points, 8, iterations=100)
    for number in range(8):
        assert torch.allclose(found.centers[number], points[found.cluster == number].mean(0), rtol=1e-9)


def test_plusplus_finds_clusters_far_apart_that_random_misses():
    centres = torch.eye(12, dtype=torch.float64) * 100
    points = centres[torch.arange(120) % 12 * (torch.arange(120) % 3 == 0)] + torch.randn(
        120, 12, generator=torch.Generator().manual_seed(1)
    )
    away = len(torch.unique(torch.arange(120) % 12 * (torch.arange(120) % 3 == 0)))
    spread, random = (kmeans(points, away, iterations=5, seeding=seeding).objective for seeding in ("plusplus", "random"))
    assert spread < random / 10


def test_an_empty_cluster_moves_to_the_farthest_point():
    points = torch.tensor([[0.0], [0.0], [0.0], [0.0], [1.0], [9.0]])
    for seed in range(5):  # most seeds start two centres at zero, one of which is empty
        found = kmeans(points, 3, iterations=4, seed=seed)
        assert sorted(found.centers[:, 0].tolist()) == [0.0, 1.0, 9.0]


def test_more_clusters_than_different_points_is_finite():
    found = kmeans(torch.ones(10, 2), 7)
    assert found.objective == 0
    assert found.centers.isfinite().all()


def test_kmeans_is_the_same_in_any_memory_and_twice(crowd):
    points, _ = crowd(pictures=500, classes=40)
    small, large, again = (kmeans(points.float(), 40, memory=memory) for memory in (1 << 12, 1 << 29, 1 << 29))
    assert torch.equal(large.cluster, again.cluster)
    assert torch.equal(small.cluster, large.cluster)


def test_kmeans_refuses_what_cannot_be():
    with pytest.raises(UnimetricError, match="11 clusters of 10 points"):
        kmeans(torch.randn(10, 2), 11)
    with pytest.raises(UnimetricError, match="plusplus"):
        kmeans(torch.randn(10, 2), 2, seeding="plus_plus")
