"""Where the papers' equations or code say something else than what we compute: one test each, by the name of the place."""

from __future__ import annotations

import math

import pytest
import torch

from unimetric.metrics import Space, measure
from unimetric.metrics.harmonic import harmonic_mean


def value(space: Space, text: str) -> float:
    return measure(space, [text])[text]


def perfect(per_class: int = 4, classes: int = 5) -> Space:
    return Space(
        torch.eye(classes, dtype=torch.float64).repeat_interleave(per_class, 0), torch.arange(classes).repeat_interleave(per_class)
    )


def test_roth_eq_27_the_factor_two_of_nmi_is_in_the_numerator():
    assert value(perfect(), "nmi(seeding='plusplus')") == pytest.approx(1.0)


def test_roth_eq_28_f1_is_of_clusters_and_not_of_neighbours():
    # Two classes on four far places: every nearest neighbour is right, yet two clusters cannot hold four places rightly.
    points = torch.tensor([[0.0, 0], [0, 9], [9, 0], [9, 9]]).repeat_interleave(5, 0) + torch.arange(20)[:, None] / 1000
    labels = torch.tensor([0, 1, 1, 0]).repeat_interleave(5)
    space = Space(points, labels, geometry="euclidean")
    assert value(space, "recall") == 1.0
    assert value(space, "f1") < 0.7


def test_roth_eq_29_prints_r_precision_but_the_tables_hold_average_precision():
    # One match of two among the first two places, at the second: precision 1/2, average precision 1/4.
    points = torch.tensor([[0.0], [2.0], [1.0], [50.0]])
    space = Space(points, torch.tensor([0, 0, 1, 0]), query=torch.tensor([True, False, False, False]), geometry="euclidean")
    assert value(space, "r_precision") == 0.5
    assert value(space, "map_at_r") == 0.25


def test_roth_map_c_counts_the_query_so_that_perfect_is_less_than_one():
    space = perfect(per_class=4)
    assert value(space, "map_at_k(class_size=True, divide='class')") == pytest.approx(3 / 4)
    assert value(space, "map_at_k(k=1000, divide='class')") == pytest.approx(3 / 4)
    assert value(space, "map_at_k") == 1.0


def test_puma_map_at_r_and_r_precision_look_one_place_too_far(crowd):
    space = Space(*crowd())
    assert value(perfect(), "map_at_r") == value(perfect(), "r_precision") == 1.0
    assert value(perfect(), "map_at_r(count_query=True)") == value(perfect(), "r_precision(count_query=True)") == pytest.approx(3 / 4)
    assert value(space, "map_at_r(count_query=True)") == value(space, "map_at_k(class_size=True, divide='class')")


def test_roth_code_drops_the_first_neighbour_which_a_duplicate_can_be():
    # Picture 0 has a duplicate of another class before it: dropping the first neighbour would drop the duplicate and find itself.
    points = torch.tensor([[1.0, 0], [1.0, 0], [0, 1.0], [0, 1.0]])
    space = Space(points, torch.tensor([1, 0, 0, 1]))
    assert space.neighbors(3)[:, 0].tolist() == [1, 0, 3, 2]
    assert value(space, "recall") == 0.0


def test_roth_pi_is_of_cosine_distances():
    right_angle = Space(torch.tensor([[1.0, 0], [0, 3.0], [-1.0, 0], [0, -2.0]]), torch.tensor([0, 0, 1, 1]))
    assert value(right_angle, "pi_intra") == pytest.approx(1.0)
    assert value(right_angle, "pi_inter") == pytest.approx(2.0)
    assert value(right_angle, "pi_ratio") == pytest.approx(0.5)


def test_roth_footnote_3_the_largest_singular_value_is_dropped():
    # One direction ten times the others: with it the spectrum is uneven, without it even.
    points = torch.diag(torch.tensor([10.0, 1, 1, 1], dtype=torch.float64))
    space = Space(points, torch.arange(4), geometry="euclidean")
    assert value(space, "spectral_decay") == pytest.approx(0, abs=1e-12)
    kept = [10 / 13, 1 / 13, 1 / 13, 1 / 13]
    assert value(space, "spectral_decay(drop_largest=0)") == pytest.approx(sum(math.log(1 / (4 * share)) / 4 for share in kept))


def test_puma_test_labels_that_collide_between_datasets_are_no_match():
    points = torch.tensor([[1.0, 0], [0.9, 0.1], [1.0, 0.01], [0.9, 0.11]])
    space = Space(points, torch.tensor([3, 3, 3, 3]), source=torch.tensor([0, 0, 1, 1]))
    assert value(space, "unified") == 0.0


@pytest.mark.parametrize(
    ("columns", "mean"),
    [
        ((81.1, 75.2, 80.2, 87.4, 75.2, 81.0, 99.1, 64.7), 79.4),  # PUMA, Table 2(a), Triplet: as printed
        ((74.5, 35.4, 80.2, 85.7, 68.2, 77.1, 98.7, 40.9), 62.5),  # Table 2(b), Triplet: printed as 57.7
        ((72.5, 36.7, 80.0, 84.1, 67.4, 74.8, 98.5, 40.4), 62.2),  # Margin: printed as 57.4
        ((66.3, 22.9, 78.9, 87.2, 58.6, 69.8, 97.3, 31.5), 51.2),  # MS: printed as 47.3
        ((77.2, 73.1, 83.7, 91.9, 71.5, 78.1, 96.4, 62.7), 78.0),  # Proxy-Anchor: printed as 71.0
        ((83.9, 84.3, 84.0, 89.8, 79.2, 84.1, 99.3, 72.6), 84.0),  # Table 2(c), PUMA: printed as 84.1
    ],
)
def test_puma_table_2b_harmonic_means_do_not_follow_from_its_columns(columns, mean):
    assert round(harmonic_mean(columns), 1) == mean
