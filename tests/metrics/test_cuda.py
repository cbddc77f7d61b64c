"""The same numbers on a GPU, with TF32 allowed by the program around."""

from __future__ import annotations

import pytest
import torch

from unimetric.geometry.nearest import nearest
from unimetric.geometry.rerank import reranked
from unimetric.metrics import Space, measure
from unimetric.spec import names

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture
def tensor_cores():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("geometry", ["cosine", "euclidean", "inner", "poincare"])
def test_every_metric_is_the_cpus(crowd, tensor_cores, geometry):
    embeddings, labels = crowd(pictures=3000, classes=200, dim=32)
    unknown = labels < 20  # for metrics of open sets
    options = {"source": (labels % 2).numpy(), "gallery": (~unknown).numpy(), "geometry": geometry}
    one, other = (Space(embeddings.float().to(device), labels.to(device), **options) for device in ("cpu", "cuda"))
    assert measure(one, names("metrics")) == pytest.approx(measure(other, names("metrics")), abs=1e-6)
    if geometry != "inner":  # re-ranking needs distances
        assert measure(reranked(one), ["map_at_r"]) == pytest.approx(measure(reranked(other), ["map_at_r"]), abs=1e-6)


def test_ties_go_to_the_lower_column(tensor_cores):
    points = torch.randint(-2, 3, (5000, 3), generator=torch.Generator().manual_seed(0)).float()  # whole numbers: exact everywhere
    for k in (1, 20, 1000):
        one, other = (
            torch.cat([near for _, _, near in nearest(points.to(device)[:100], points.to(device), k)]).cpu() for device in ("cpu", "cuda")
        )
        assert torch.equal(one, other)
