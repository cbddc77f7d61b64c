"""Losses in loops of other projects: batches that do not fit are rejected, and a diverged model is not a perfect one."""

from __future__ import annotations

import pytest
import torch

from unimetric.errors import UnimetricError
from unimetric.geometry import Triplets
from unimetric.spec import create, find, names

CLASSES, DIM = 4, 8
LOSSES = [name for name in names("losses") if "." not in name]


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return create("losses", name, num_classes=CLASSES, dim=DIM).train()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(16, DIM, generator=torch.Generator().manual_seed(0)), torch.arange(16) % CLASSES


@pytest.mark.parametrize("name", LOSSES)
def test_labels_of_any_integer_type(name: str) -> None:
    embeddings, labels = batch()
    values = [build(name)(embeddings, labels.to(dtype)).item() for dtype in (torch.int64, torch.int32, torch.uint8)]
    assert values[0] == values[1] == values[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOSSES)
def test_autocast_changes_no_loss(name: str, dtype: torch.dtype) -> None:
    """Inner products of these embeddings overflow in float16."""
    rows, labels = batch()
    rows = 400 * torch.nn.functional.normalize(rows)
    values, slopes = [], []
    for enabled in (False, True):
        embeddings = rows.clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            values.append(build(name)(embeddings, labels))
        slopes += torch.autograd.grad(values[-1], embeddings)
    assert values[0].isfinite() and torch.equal(*values) and torch.equal(*slopes)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "smooth_ap"])  # which rejects second derivatives
def test_second_derivatives_are_finite(name: str) -> None:
    embeddings, labels = batch()
    embeddings[1], embeddings[5], embeddings[8] = 0, 1e-25, embeddings[4]  # zero, nearly zero, and coinciding embeddings
    loss = build(name)(embeddings.requires_grad_(), labels)
    (slope,) = torch.autograd.grad(loss, embeddings, create_graph=True)
    (second,) = torch.autograd.grad(slope.square().sum(), embeddings)
    assert slope.isfinite().all() and second.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_embeddings_that_are_not_finite_give_no_finite_loss(name: str) -> None:
    embeddings, labels = batch()
    embeddings[:] = torch.nan
    assert not torch.isfinite(build(name)(embeddings, labels))


@pytest.mark.parametrize("name", LOSSES)
def test_batches_that_do_not_fit_are_rejected(name: str) -> None:
    loss, (embeddings, labels) = build(name), batch()
    for rows, given in ((embeddings[:0], labels[:0]), (embeddings, labels[:7]), (embeddings[0], labels), (embeddings, labels[:, None])):
        with pytest.raises(UnimetricError, match=r"must have the shapes \(B, D\) and \(B,\)"):
            loss(rows, given)
    for given in (labels.tolist(), labels.numpy(), labels.float()):
        with pytest.raises(UnimetricError, match="labels must be a tensor of integers"):
            loss(embeddings, given)
    for rows in (embeddings.tolist(), embeddings.numpy(), embeddings.long()):
        with pytest.raises(UnimetricError, match="embeddings must be a tensor of floats"):
            loss(rows, labels)


@pytest.mark.parametrize("name", names("miners"))
def test_miners_reject_what_are_not_tensors(name: str) -> None:
    miner, (embeddings, labels) = create("miners", name), batch()
    for given in (labels.tolist(), labels.numpy(), labels.float()):
        with pytest.raises(UnimetricError, match="labels must be a tensor of integers"):
            miner(embeddings, given)
    with pytest.raises(UnimetricError, match="embeddings must be a tensor of floats"):
        miner(embeddings.numpy(), labels)


@pytest.mark.parametrize("name", names("miners"))
def test_autocast_changes_no_miner(name: str) -> None:
    # Pairs whose order bfloat16 does not resolve.
    rows, labels = 1 + 0.05 * batch()[0], batch()[1]
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            found.append(create("miners", name)(rows, labels))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", [name for name in LOSSES if build(name).num_classes])
@pytest.mark.parametrize("change", [1, -1])
def test_labels_beyond_the_classes_are_rejected(name: str, change: int) -> None:
    embeddings, labels = batch()
    with pytest.raises(UnimetricError, match=r"labels must be from 0 to 3, got") as caught:
        build(name)(embeddings, labels + change)
    assert "num_classes" in caught.value.hint


def test_losses_with_parameters_of_classes_know_their_number() -> None:
    sized = {name for name in LOSSES if any(CLASSES in parameter.shape for parameter in build(name).parameters())}
    assert sized == {name for name in LOSSES if build(name).num_classes} and len(sized) >= 9
    assert all(build(name).num_classes == CLASSES for name in sized)


@pytest.mark.parametrize("name", [name for name in names("miners") if "." not in name])
def test_miners_reject_batches_that_do_not_fit(name: str) -> None:
    miner, (embeddings, labels) = create("miners", name), batch()
    assert len(miner(embeddings, labels.int())) in (3, 4)
    for rows, given in ((embeddings[:0], labels[:0]), (embeddings, labels[:7])):
        with pytest.raises(UnimetricError, match=r"must have the shapes \(B, D\) and \(B,\)"):
            miner(rows, given)


@pytest.mark.parametrize("name", [name for name in LOSSES if not list(build(name).parameters())])
def test_losses_without_parameters_need_no_device(name: str) -> None:
    """The meta device, which has no values, replaces a GPU."""
    embeddings, labels = (each.to("meta") for each in batch())
    assert build(name)(embeddings, labels).device.type == "meta"


@pytest.mark.parametrize("name", [name for name in names("miners") if find("miners", name).gives is Triplets])
def test_miners_need_no_device(name: str) -> None:
    embeddings, labels = (each.to("meta") for each in batch())
    assert create("losses", "triplet", miner=name)(embeddings, labels).device.type == "meta"
