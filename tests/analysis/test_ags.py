"""AGS from the columns that Milbich et al. 2021 print (supplement, tables 4 to 6) is the AGS that they print (table 3)."""

import numpy as np
import pytest

from unimetric.analysis.curves import ags
from unimetric.errors import UnimetricError

CUB = [19.16, 28.49, 52.62, 72.20, 92.48, 120.38, 136.45, 152.04, 173.94]
CARS = [8.59, 14.33, 32.18, 43.58, 63.29, 86.48, 101.17, 123.03]
SOP = [3.43, 24.59, 53.47, 99.38, 135.53, 155.25, 189.81, 235.10]


@pytest.mark.parametrize(
    ("distances", "scores", "printed"),
    [
        (CUB, [76.20, 71.79, 65.78, 65.38, 63.30, 61.53, 59.95, 57.67, 58.59], 63.6),  # margin, recall@1
        (CUB, [77.30, 72.95, 66.64, 66.39, 64.64, 63.03, 62.27, 60.25, 60.44], 65.1),  # proxy anchor
        (CUB, [78.93, 75.20, 69.24, 68.70, 67.28, 66.10, 64.64, 62.93, 63.02], 67.7),  # S2SD
        (CUB, [44.76, 39.69, 34.31, 33.59, 30.64, 28.17, 26.72, 25.45, 26.18], 31.2),  # margin, mAP@1000
        (CARS, [83.89, 82.99, 81.27, 78.95, 75.59, 69.97, 67.41, 64.77], 74.5),  # margin, recall@1
        (CARS, [84.33, 83.84, 82.03, 80.01, 77.14, 72.97, 69.78, 66.01], 76.1),  # multi-similarity
        (SOP, [79.39, 78.58, 77.48, 76.18, 74.53, 72.62, 70.68, 69.71], 74.6),  # margin
    ],
)
def test_published_columns_give_published_scores(distances, scores, printed):
    # One unit of the last printed digit: the columns are rounded, and the printed scores are means over seeds.
    assert ags(distances, scores) == pytest.approx(printed, abs=0.055)


def test_order_and_unit_of_distances_do_not_matter():
    order = np.random.default_rng(0).permutation(len(CUB))
    scores = np.random.default_rng(1).random(len(CUB))
    assert ags(np.array(CUB)[order] * 7 + 3, scores[order]) == pytest.approx(ags(CUB, scores), rel=1e-12)


def test_a_constant_is_its_own_score():
    assert ags(CARS, [0.4] * len(CARS)) == pytest.approx(0.4, rel=1e-12)


@pytest.mark.parametrize(("distances", "scores"), [([1.0], [0.5]), ([1.0, 1.0], [0.5, 0.6]), ([1.0, 2.0], [0.5])])
def test_no_area(distances, scores):
    with pytest.raises(UnimetricError, match="AGS requires"):
        ags(distances, scores)
