"""Audits on galleries whose duplicates, wrong labels, clusters and outliers are known."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from unimetric.audits.suspicious_labels import Classifier
from unimetric.geometry.space import Space
from unimetric.kinds import Audited, Findings
from unimetric.spec import create, names


def gallery(points: np.ndarray, labels: list | None = None, images: list[np.ndarray | None] | None = None, **columns: list) -> Audited:
    labels = [None] * len(points) if labels is None else labels
    numbers = np.array([sorted(map(str, set(labels))).index(str(label)) for label in labels])
    ids = [f"{row:03d}.png" for row in range(len(points))]
    read = (lambda id_: None) if images is None else (lambda id_: images[int(id_[:3])])
    return Audited(Space(points.astype(np.float32), numbers), ids, labels, columns, read)


def blobs(rng: np.random.Generator, classes: int = 5, each: int = 20, dim: int = 16, noise: float = 0.25) -> tuple[np.ndarray, list[str]]:
    centers = rng.normal(size=(classes, dim))
    points = np.repeat(centers / np.linalg.norm(centers, axis=1, keepdims=True), each, 0) + noise / dim**0.5 * rng.normal(
        size=(classes * each, dim)
    )
    return points, [f"class {number}" for number in range(classes) for _ in range(each)]


@pytest.mark.parametrize("name", names("audits"))
def test_audit_accepts_small_galleries_and_returns_one_kind_of_rows(name: str) -> None:
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, 30):
        images = [rng.integers(0, 256, (20, 30, 3)).astype(np.uint8) for _ in range(count)]
        for labels in (None, ["a"] * count, ["a", None, "b"] * 10):
            found = create("audits", name, gallery=gallery(rng.normal(size=(count, 4)), labels[:count] if labels else None, images))
            assert isinstance(found, Findings) and found.title and found.note
            assert len({tuple(row) for row in found.rows}) <= 1
            assert all(len(group.ids) == len(group.names) for group in found.groups)


def scene(rng: np.random.Generator) -> Image.Image:
    """Colored blobs at random places, like a photograph at low resolution."""
    return Image.fromarray(rng.integers(0, 256, (7, 9, 3)).astype(np.uint8)).resize((270, 210), Image.Resampling.BICUBIC)


def compress(image: Image.Image) -> Image.Image:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=30)
    return Image.open(out).convert("RGB")


CHANGES = {
    "resized": lambda image: image.resize((90, 70)),
    "compressed": compress,
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "cropped": lambda image: image.crop((31, 13, 31 + 216, 13 + 168)),
    "mirrored crop": lambda image: image.crop((0, 20, 220, 200)).transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}


@pytest.mark.parametrize("change", CHANGES)
def test_near_duplicates_are_grouped(change: str) -> None:
    rng = np.random.default_rng(1)
    scenes = [scene(rng) for _ in range(10)]
    images = [np.asarray(each) for each in (*scenes, *(CHANGES[change](each) for each in scenes[:4]))]
    points = rng.normal(size=(10, 8))
    points = np.concatenate([points, points[:4] + 0.1 * rng.normal(size=(4, 8))])
    split = ["train"] * 10 + ["test"] * 4
    found = create("audits", "near_duplicates", gallery=gallery(points, None, images, split=split))
    groups = {frozenset(int(id_[:3]) for id_ in group.ids) for group in found.groups}
    assert groups == {frozenset((each, each + 10)) for each in range(4)}
    assert "4 groups are in more than one split" in found.note
    assert all(row["several splits"] for row in found.rows)


def test_near_duplicates_skip_missing_and_uniform_images() -> None:
    images: list[np.ndarray | None] = [np.zeros((9, 9, 3), np.uint8), np.full((9, 9, 3), 9, np.uint8), None, None]
    assert not create("audits", "near_duplicates", gallery=gallery(np.ones((4, 3)) + np.eye(4, 3), None, images)).groups


def test_near_duplicates_finds_equal_images_of_one_color() -> None:
    images = [np.full((9, size, 3), color, np.uint8) for size, color in ((9, 200), (9, 40), (9, 200), (8, 200))]
    found = create("audits", "near_duplicates", gallery=gallery(np.ones((4, 3)) + np.eye(4, 3), None, images))
    assert [group.ids for group in found.groups] == [["000.png", "002.png"]]


def test_suspicious_labels_finds_swapped_labels() -> None:
    rng = np.random.default_rng(2)
    points, labels = blobs(rng)
    wrong = set(rng.permutation(100)[:8].tolist())
    given = [f"class {(int(label[-1]) + 1 + row % 4) % 5}" if row in wrong else label for row, label in enumerate(labels)]
    found = create("audits", "suspicious_labels", gallery=gallery(points, given))
    assert {int(row["id"][:3]) for row in found.rows} == wrong
    assert {row["id"]: row["suggested"] for row in found.rows} == {f"{row:03d}.png": labels[row] for row in wrong}
    chances = [row["probability"] for row in found.rows]
    assert chances == sorted(chances)


def test_classifier_without_a_point_equals_a_new_fit() -> None:
    rng = np.random.default_rng(6)
    points, numbers = torch.from_numpy(rng.normal(size=(40, 6))), torch.from_numpy(rng.integers(0, 3, 40))
    classifier = Classifier(points, numbers)
    target = torch.nn.functional.one_hot(numbers, 3).double() - classifier.fractions
    rows = torch.arange(40) != 7
    # The mean of all points is kept, and a column of ones fits the mean of the others.
    inputs = torch.cat([points - classifier.mean, torch.ones(40, 1)], 1)
    penalty = torch.diag(torch.tensor([classifier.penalty] * 6 + [0.0], dtype=torch.float64))
    weights = torch.linalg.solve(inputs[rows].mT @ inputs[rows] + penalty, inputs[rows].mT @ target[rows])
    torch.testing.assert_close(classifier.leave_one_out(torch.tensor([7]))[0], inputs[7] @ weights)


def test_worst_classes_names_confusions() -> None:
    rng = np.random.default_rng(3)
    points, labels = blobs(rng)
    points[:20] = points[20:40] + 0.01 * rng.normal(size=(20, 16))  # class 0 is where class 1 is
    found = create("audits", "worst_classes", gallery=gallery(points, labels))
    assert {row["label"] for row in found.rows} == {"class 0", "class 1"}
    assert found.rows[0]["recall"] < 0.6 and "class" in found.rows[0]["found instead"]
    assert "Mean over all 5 classes" in found.note


def test_worst_classes_skips_images_without_a_label() -> None:
    points, labels = blobs(np.random.default_rng(3))
    some: list = [label if row % 4 == 0 else None for row, label in enumerate(labels)]
    found = create("audits", "worst_classes", gallery=gallery(points, some))
    assert "Mean over all 5 classes: 100.0 %" in found.note and not found.rows
    some[0] = "class 1"  # its copy in class 0 has no label
    (row,) = create("audits", "worst_classes", gallery=gallery(points, some)).rows
    assert (row["label"], row["images"], row["found instead"]) == ("class 1", 6, "class 0 (1)")


def test_worst_classes_of_single_images_has_no_mean() -> None:
    found = create("audits", "worst_classes", gallery=gallery(np.eye(5), list("abcde")))
    assert "nan" not in found.note and not found.rows


def test_clusters_finds_their_number() -> None:
    rng = np.random.default_rng(4)
    points, labels = blobs(rng, classes=7, each=30, noise=0.2)
    found = create("audits", "clusters", gallery=gallery(points))
    assert "7 clusters" in found.note
    pairs = {(row["cluster"], label) for row, label in zip(found.rows, labels, strict=True)}
    assert len(pairs) == 7


def test_outliers_are_found() -> None:
    rng = np.random.default_rng(5)
    points, _ = blobs(rng, classes=3, each=30, noise=0.3)
    points[[7, 50]] = -points.mean(0) * 3 + rng.normal(size=(2, 16))
    found = create("audits", "outliers", gallery=gallery(points))
    assert {int(row["id"][:3]) for row in found.rows[:2]} == {7, 50} and len(found.rows) <= 4


def test_copies_are_no_outliers() -> None:
    copies = np.random.default_rng(0).normal(size=(6, 32)).repeat(20, 0)
    assert not create("audits", "outliers", gallery=gallery(copies)).rows  # their scores differ by the rounding of float32
    found = create("audits", "outliers", gallery=gallery(np.concatenate([copies, -copies[:1]])))
    assert [row["id"] for row in found.rows] == ["120.png"]
