"""The on-ramp from pytorch-metric-learning, with the real package."""

import copy
import math

import pytest
import torch
from pytorch_metric_learning import losses as peer_losses
from pytorch_metric_learning import miners as peer_miners

from unimetric.errors import UnimetricError
from unimetric.geometry import Memory, Pairs, Triplets, compare, unit
from unimetric.miners import Hardest
from unimetric.objectives import Output
from unimetric.spec import bind, create


def example(size=16, classes=4, seed=0):
    torch.manual_seed(seed)
    return torch.randn(size, 8, dtype=torch.float64), torch.arange(size) % classes


def ring(z, y, own):
    """A memory of which the first ten slots are filled, `own` among them."""
    valid = torch.arange(14) < 10
    torch.manual_seed(3)
    embeddings, labels = torch.randn(14, 8, dtype=torch.float64), torch.randint(0, 4, (14,))
    embeddings[own], labels[own] = z.detach(), y
    return Memory(embeddings, labels, valid, own)


@pytest.mark.parametrize(
    ("text", "theirs"),
    [
        ("CircleLoss(m=0.4)", lambda: peer_losses.CircleLoss(m=0.4)),
        ("TripletMarginLoss(margin=0.1)", lambda: peer_losses.TripletMarginLoss(margin=0.1)),
        ("SupConLoss", lambda: peer_losses.SupConLoss()),
        ("FastAPLoss(num_bins=5)", lambda: peer_losses.FastAPLoss(num_bins=5)),
    ],
)
def test_a_loss_by_dotted_name(text, theirs):
    z, y = example()
    loss = create("losses", f"pytorch_metric_learning.losses.{text}", num_classes=4, dim=8, miner=None)
    assert loss(z, y).item() == theirs()(z, y).item()
    loss(z.requires_grad_(), y).backward()
    assert z.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["ProxyAnchorLoss", "CosFaceLoss", "ArcFaceLoss(margin=10)", "SoftTripleLoss(centers_per_class=2)"])
def test_a_loss_with_proxies_is_given_classes_and_dimension(name):
    z, y = example()
    loss = create("losses", f"pytorch_metric_learning.losses.{name}", num_classes=4, dim=8)
    assert loss.family == "proxy"
    assert all(8 in parameter.shape and parameter.numel() % (4 * 8) == 0 for parameter in loss.parameters())
    loss(z.float(), y).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in loss.parameters())
    memory = ring(z[:3], y[:3], torch.arange(3))
    assert loss(z[:3], y[:3], memory).isfinite()  # ignored, as by our proxies


def test_its_learning_rate_is_where_the_engine_looks():
    rates = {}
    for text in ("ProxyAnchorLoss", "ProxyAnchorLoss(lr=0.3)"):
        loss = create("losses", f"pytorch_metric_learning.losses.{text}", num_classes=4, dim=8)
        rates[text] = [module.lr for module in loss.modules() if list(module.parameters(recurse=False))]
    assert rates == {"ProxyAnchorLoss": [0.01], "ProxyAnchorLoss(lr=0.3)": [0.3]}


def test_what_the_config_checks_needs_no_run():
    _, arguments = bind("losses", "pytorch_metric_learning.losses.ProxyAnchorLoss(alpha=16)", num_classes=1, dim=1, miner="")
    assert arguments == {"num_classes": 1, "embedding_size": 1, "alpha": 16}


MINERS = [
    ("MultiSimilarityMiner(epsilon=0.1)", lambda: peer_miners.MultiSimilarityMiner(epsilon=0.1)),
    ("PairMarginMiner(pos_margin=0.5, neg_margin=1.2)", lambda: peer_miners.PairMarginMiner(pos_margin=0.5, neg_margin=1.2)),
    ("HDCMiner", lambda: peer_miners.HDCMiner()),
    ("TripletMarginMiner(margin=0.2, type_of_triplets='semihard')", lambda: peer_miners.TripletMarginMiner(0.2, "semihard")),
    ("BatchHardMiner", lambda: peer_miners.BatchHardMiner()),
    ("BatchEasyHardMiner", lambda: peer_miners.BatchEasyHardMiner()),
    ("DistanceWeightedMiner(cutoff=0.4)", lambda: peer_miners.DistanceWeightedMiner(cutoff=0.4)),
]


def as_set(mined):
    if isinstance(mined, Triplets):
        return set(zip(*(index[mined.valid].tolist() for index in (mined.anchor, mined.positive, mined.negative)), strict=True))
    return {("positive", *pair) for pair in mined.positive.nonzero().tolist()} | {
        ("negative", *pair) for pair in mined.negative.nonzero().tolist()
    }


def peer_set(found):
    if len(found) == 3:
        return set(zip(*(index.tolist() for index in found), strict=True))
    a, p, b, n = (index.tolist() for index in found)
    return {("positive", *pair) for pair in zip(a, p, strict=True)} | {("negative", *pair) for pair in zip(b, n, strict=True)}


@pytest.mark.parametrize(("text", "theirs"), MINERS, ids=[text.split("(")[0] for text, _ in MINERS])
def test_a_miner_by_dotted_name_finds_what_it_finds(text, theirs):
    z, y = example()
    miner = create("miners", f"pytorch_metric_learning.miners.{text}")
    torch.manual_seed(5)
    mined = miner(*compare(z, y * 2**30))
    torch.manual_seed(5)
    found = theirs()(z, y)
    assert isinstance(mined, miner.gives)
    assert as_set(mined) == peer_set(found) != set()


@pytest.mark.parametrize(("text", "theirs"), MINERS[:5], ids=[text.split("(")[0] for text, _ in MINERS[:5]])
def test_a_miner_with_a_memory(text, theirs):
    """As pytorch-metric-learning's memory does: mined with the filled references, comparisons with itself taken out."""
    z, y = example(size=6)
    own = torch.tensor([8, 9, 0, 1, 2, 3])
    memory = ring(z, y, own)
    mined = create("miners", f"pytorch_metric_learning.miners.{text}")(*compare(z, y, memory))
    found = theirs()(z, y, memory.embeddings[:10], memory.labels[:10])
    expected = {item for item in peer_set(found) if not (item[0] == "positive" and item[2] == own[item[1]])}
    if len(found) == 3:
        expected = {item for item in expected if item[1] != own[item[0]]}
    assert as_set(mined) == expected


def test_their_miner_for_our_loss_equals_ours():
    z, y = example()
    theirs = create("losses", "multi_similarity", miner="pytorch_metric_learning.miners.MultiSimilarityMiner(epsilon=0.1)")
    ours = create("losses", "multi_similarity", miner="multi_similarity(epsilon=0.1)")
    assert theirs(z, y).item() == ours(z, y).item() > 0


def test_their_miner_for_their_loss():
    z, y = example()
    text = "pytorch_metric_learning.miners.TripletMarginMiner(margin=0.1)"
    loss = create("losses", "pytorch_metric_learning.losses.TripletMarginLoss(margin=0.3)", miner=text)
    found = peer_miners.TripletMarginMiner(margin=0.1)(z, y)
    assert math.isclose(loss(z, y).item(), peer_losses.TripletMarginLoss(margin=0.3)(z, y, found).item(), rel_tol=1e-12)


def test_our_miner_for_their_loss():
    z, y = example()
    loss = create("losses", "pytorch_metric_learning.losses.MarginLoss", miner="hardest", num_classes=4)
    mined = create("miners", "hardest")(*compare(z, y))
    found = (mined.anchor[mined.valid], mined.positive[mined.valid], mined.negative[mined.valid])
    assert math.isclose(loss(z, y).item(), peer_losses.MarginLoss()(z, y, found).item(), rel_tol=1e-9)


def test_their_miner_inside_rho():
    z, y = example()
    miner = create("miners", "rho(p_switch=0.0, miner='pytorch_metric_learning.miners.TripletMarginMiner')")
    assert as_set(miner(*compare(z, y))) == peer_set(peer_miners.TripletMarginMiner()(z, y))


@pytest.mark.parametrize("name", ["ContrastiveLoss", "NCALoss", "SupConLoss"])
def test_their_loss_in_our_memory_equals_their_memory(name):
    """Over three batches, the ring once round."""
    ours = create(
        "objectives", "cross_batch(size=20, memory_only=True)", loss=f"pytorch_metric_learning.losses.{name}", num_classes=4, dim=8
    )
    theirs = peer_losses.CrossBatchMemory(getattr(peer_losses, name)(), embedding_size=8, memory_size=20)
    for step in range(3):
        z, y = example(size=8, seed=step)
        z = unit(z).float()
        assert math.isclose(ours(Output(z, z[:, None], z), y)["loss"].item(), theirs(z, y).item(), rel_tol=1e-5)


def test_a_batch_without_pairs_gives_zero_with_a_gradient():
    z = torch.randn(3, 8, requires_grad=True)
    loss = create("losses", "pytorch_metric_learning.losses.ContrastiveLoss", miner="pytorch_metric_learning.miners.MultiSimilarityMiner")
    value = loss(z, torch.zeros(3, dtype=torch.int64) + torch.arange(3))
    value.backward()
    assert value.item() == 0
    assert z.grad.isfinite().all()


def test_copies_and_half_precision():
    z, y = example()
    loss = create("losses", "pytorch_metric_learning.losses.MultiSimilarityLoss", miner="pytorch_metric_learning.miners.BatchHardMiner")
    assert copy.deepcopy(loss)(z, y) == loss(z, y)
    assert loss(z.bfloat16(), y).dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("losses", "pytorch_metric_learning.losses.CircleLoss(n=0.4)", "cannot build"),
        ("losses", "pytorch_metric_learning.losses.CircelLoss", "has no `CircelLoss`"),
        ("losses", "pytorch_metric_learning.miners.BatchHardMiner", "must be one of the losses"),
        ("miners", "pytorch_metric_learning.losses.CircleLoss", "must be one of the miners"),
        ("miners", "pytorch_metric_learning.miners.AngularMiner", "reads embeddings"),
        ("losses", "pytorch_metric_learning.losses.ProxyAnchorLoss", "needs `num_classes`"),
    ],
)
def test_mistakes_say_what_is_wrong(kind, text, words):
    with pytest.raises(UnimetricError, match=words):
        create(kind, text)


def test_a_miner_that_does_not_fit_is_refused():
    with pytest.raises(UnimetricError, match="reads Triplets"):
        create("losses", "quadruplet", miner="pytorch_metric_learning.miners.MultiSimilarityMiner")


def test_other_packages_pass_untouched():
    assert type(create("losses", "torch.nn.Identity", trust=["torch"])) is torch.nn.Identity
    assert isinstance(create("miners", "unimetric.miners.all.All")(*compare(*example())), Pairs)


def test_objects_are_converted_like_dotted_names():
    z, y = example()
    for theirs in ("BatchHardMiner", "MultiSimilarityMiner"):
        by_name = create("losses", "multi_similarity", miner=f"pytorch_metric_learning.miners.{theirs}")
        assert create("losses", "multi_similarity", miner=getattr(peer_miners, theirs)())(z, y).item() == by_name(z, y).item()
    for theirs in (peer_losses.ContrastiveLoss(), peer_losses.ProxyAnchorLoss(4, 8).double()):
        loss = create("losses", theirs)
        assert loss.loss is theirs and loss(z, y, None).item() == theirs(z, y).item()
        assert loss.family == ("proxy" if list(theirs.parameters()) else "pair")


def test_classes_are_not_objects():
    for kind, part in (("miners", peer_miners.BatchHardMiner), ("miners", Hardest), ("losses", torch.nn.Identity)):
        with pytest.raises(UnimetricError, match=f"`{part.__name__}` is a class(.|\n)*`{part.__name__}\\(\\)`"):
            create(kind, part)
