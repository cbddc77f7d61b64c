import math

import pytest
import torch
from pytorch_metric_learning import losses as peer
from pytorch_metric_learning import miners as peer_miners

from unimetric.errors import UnimetricError
from unimetric.objectives import Output
from unimetric.objectives.cross_batch import CrossBatch
from unimetric.spec import create, find, names

DIM = 6


def batch(step, size=8, dtype=torch.float64):
    torch.manual_seed(step)
    return torch.randn(size, DIM, dtype=dtype), torch.randint(0, 4, (size,))


def output(z):
    return Output(z, z[:, None], z)


def build(**arguments):
    return CrossBatch(num_classes=4, dim=DIM, **arguments).double()


def naive_contrastive(z, y, references, labels, own, margin=0.5):
    """The contrastive loss of XBM's code, without an anchor's own copy."""
    total = 0.0
    for i, (x, label) in enumerate(zip(z, y.tolist(), strict=True)):
        for j, (r, other) in enumerate(zip(references, labels, strict=True)):
            s = float(x @ r / x.norm() / r.norm())
            if label == other and j != own[i]:
                total += 1 - s
            elif label != other and s > margin:
                total += s
    return total / len(y)


def test_the_original_form_slot_by_slot():
    """The ring in plain lists: the batch enters first, the oldest leave, nothing is kept before the start."""
    objective = build(loss="contrastive(cosine=True, margin=0.5)", miner="all", size=20, weight=0.7, start=2)
    slots, place = [None] * 20, 0
    for step in range(7):
        z, y = batch(step)
        terms = objective(output(z), y)
        alone = naive_contrastive(z, y, z, y.tolist(), list(range(8)))
        assert math.isclose(terms["loss"].item(), alone, rel_tol=1e-9)
        if step < 2:
            assert terms["memory"].item() == 0
            continue
        own = [(place + i) % 20 for i in range(8)]
        for slot, x, label in zip(own, z, y.tolist(), strict=True):
            slots[slot] = (x, label)
        place = (place + 8) % 20
        filled = [slot for slot in slots if slot is not None]
        expected = naive_contrastive(z, y, [x for x, _ in filled], [label for _, label in filled], own)
        assert math.isclose(terms["memory"].item(), 0.7 * expected, rel_tol=1e-9)


@pytest.mark.parametrize(
    ("ours", "miner", "theirs", "their_miner"),
    [
        ("contrastive(active_only=True)", "all", lambda: peer.ContrastiveLoss(), None),
        ("multi_similarity(beta=50.0, kept_only=False)", "all", lambda: peer.MultiSimilarityLoss(), None),
        (
            "multi_similarity(beta=50.0, kept_only=False)",
            "multi_similarity(epsilon=0.1)",
            lambda: peer.MultiSimilarityLoss(),
            lambda: peer_miners.MultiSimilarityMiner(epsilon=0.1),
        ),
        ("sup_con", None, lambda: peer.SupConLoss(), None),
    ],
)
def test_memory_only_equals_the_peer(ours, miner, theirs, their_miner):
    objective = build(loss=ours, miner=miner, size=20, memory_only=True)
    peer_memory = peer.CrossBatchMemory(theirs(), embedding_size=DIM, memory_size=20, miner=their_miner and their_miner()).double()
    for step in range(6):
        z, y = batch(step)[0], torch.arange(8) % 4
        z = z / z.norm(dim=1, keepdim=True)
        terms = objective(output(z), y)
        assert list(terms) == ["loss"]
        assert math.isclose(terms["loss"].item(), peer_memory(z, y).item(), rel_tol=1e-6)


def test_memory_only_may_start_late():
    objective = build(loss="multi_similarity", size=20, memory_only=True, start=2)
    plain = create("losses", "multi_similarity")
    values = [(objective(output(z), y)["loss"].item(), plain(z, y).item()) for z, y in map(batch, range(5))]
    assert all(with_memory == alone for with_memory, alone in values[:2])
    assert values[2][0] == pytest.approx(values[2][1], rel=1e-12)  # the memory holds this batch alone
    assert all(with_memory != alone for with_memory, alone in values[3:])


def test_the_gradient_flows_through_the_anchors_alone():
    objective = build(loss="contrastive(cosine=True)", miner="all", size=20, start=0)
    first, second = batch(0), batch(1)
    old = first[0].requires_grad_()
    objective(output(old), first[1])
    z = second[0].requires_grad_()
    objective(output(z), second[1])["memory"].backward()
    assert old.grad is None
    memory = torch.cat([first[0], second[0]]).detach()
    labels = torch.cat([first[1], second[1]])
    nudge = 1e-6
    for i, k in ((0, 0), (3, 4)):
        moved = second[0].detach().clone()
        moved[i, k] += nudge
        own = list(range(8, 16))
        up = naive_contrastive(moved, second[1], memory, labels.tolist(), own, margin=1.0)
        down = naive_contrastive(second[0].detach(), second[1], memory, labels.tolist(), own, margin=1.0)
        assert math.isclose(z.grad[i, k].item(), (up - down) / nudge, rel_tol=1e-4)


@pytest.mark.parametrize("name", [name for name in names("losses") if find("losses", name).family != "proxy"])
def test_every_pair_and_tuple_loss_reads_a_memory_and_no_empty_slot_of_it(name):
    values = []
    for size in (24, 100):
        objective = build(loss=name, size=size, start=1)
        for step in range(4):
            z, y = batch(step)
            z.requires_grad_()
            terms = objective(output(z), y)
            sum(terms.values()).backward()
            assert z.grad.isfinite().all()
        values.append(terms["memory"].item())
    assert values[0] == pytest.approx(values[1], rel=1e-9)
    assert math.isfinite(values[0])


def test_a_resumed_run_goes_on_as_the_unbroken_one():
    unbroken, broken = (build(loss="margin", size=20, start=1) for _ in range(2))
    for step in range(3):
        for objective in (unbroken, broken):
            objective(output(batch(step)[0]), batch(step)[1])
    resumed = build(loss="margin", size=20, start=1)
    resumed.load_state_dict(broken.state_dict())
    for step in range(3, 5):
        z, y = batch(step)
        assert {key: term.item() for key, term in resumed(output(z), y).items()} == {
            key: term.item() for key, term in unbroken(output(z), y).items()
        }


def test_two_forward_passes_before_one_backward():
    """As gradient accumulation does: the ring must not be written over what the first pass keeps."""
    objective = build(loss="n_pair", size=20, start=0)
    z, y = batch(0)
    z.requires_grad_()
    total = sum(sum(objective(output(z), y).values()) for _ in range(2))
    total.backward()
    assert z.grad.isfinite().all()


def test_proxies_are_refused():
    with pytest.raises(UnimetricError, match="compares with proxies"):
        CrossBatch(loss="proxy_anchor", num_classes=4, dim=DIM)


def test_a_batch_larger_than_the_memory_is_refused():
    with pytest.raises(UnimetricError, match="at least the batch size"):
        build(loss="margin", size=7)(output(batch(0)[0]), batch(0)[1])
    with pytest.raises(UnimetricError, match="at least the batch size of 8"):  # in a run, before any picture is read
        create("objectives", "cross_batch(size=7)", num_classes=4, dim=DIM, batch_size=8)
