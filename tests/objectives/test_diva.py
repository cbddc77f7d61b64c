"""DiVA: each term against plain loops in float64; the moving average, the queue, and the reversed gradients by their rules."""

import copy
import math

import pytest
import torch

from unimetric.config import load
from unimetric.errors import UnimetricError
from unimetric.geometry import match
from unimetric.objectives import Output
from unimetric.objectives.diva import Diva, _Within, inverse_density_weights, likeness
from unimetric.runs.model import Model
from unimetric.spec import create
from unimetric.training.build import build_optimizer

DIM, BATCH, QUEUE = 6, 8, 3
LABELS = torch.arange(BATCH) // 2


def build(**arguments):
    torch.manual_seed(0)
    settings = {"loss": "multi_similarity", "queue": QUEUE, "hidden": 7} | arguments
    return Diva(num_classes=4, branches=(DIM,) * 4, batch_size=BATCH, **settings).double()


def model():
    torch.manual_seed(3)
    backbone = create("backbones", "small(channels=16)")
    return Model(backbone, create("heads", f"diva(dim={DIM})", features=16)).double()


def output(seed=0, views=()):
    torch.manual_seed(seed)
    branches = tuple(torch.randn(BATCH, DIM).double().requires_grad_() for _ in range(4))
    images = torch.zeros(BATCH, 3, 2, 2)
    return Output(torch.cat(branches, 1), torch.zeros(BATCH, 2, 4), images, branches, views)


def directions(x):
    return [row / row.norm() for row in x.detach()]


def naive_rarity(similarities):
    weights = []
    for s in similarities:
        d = max(0.5, math.sqrt(2 - 2 * s))
        weights.append(d ** (2 - DIM) * (1 - d * d / 4) ** (-(DIM - 3) / 2) if d <= 1.4 else 0.0)
    # All beyond the cutoff: the floor makes them equal.
    return [w / sum(weights) for w in weights] if sum(weights) else [1 / len(weights)] * len(weights)


def naive_dance(query, keys, queue, temperature=0.01):
    total = 0.0
    for q, k in zip(query, keys, strict=True):
        similarities = [float(q @ m) for m in queue]
        weights = naive_rarity(similarities)
        logits = [float(q @ k) / temperature] + [w * s / temperature for w, s in zip(weights, similarities, strict=True)]
        top = max(logits)
        total += top + math.log(sum(math.exp(x - top) for x in logits)) - logits[0]
    return total / len(query)


def test_self_similarity_and_the_queue_slot_by_slot():
    """The queue in plain lists: it begins empty, the oldest keys leave first, a batch is no negative of itself."""
    objective = build(queue=QUEUE, own=0.3)
    queue: list = []
    for step in range(6):
        given = output(step)
        # Without a network that follows, the branch itself is the key; as small a similarity as possible, for a loss that is not zero.
        keys = directions(given.branches[2])
        value = objective(given, LABELS)["self"].item()
        expected = 0.3 * naive_dance(directions(given.branches[2]), keys, queue) if queue else 0.0
        assert math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12), step
        queue = (queue + keys)[-QUEUE * BATCH :]
        kept = {tuple(round(x, 9) for x in key.tolist()) for key in objective.keys[: len(queue)]}
        assert kept == {tuple(round(x, 9) for x in key.tolist()) for key in queue}
    assert objective.state.tolist() == [6 * BATCH % (QUEUE * BATCH), QUEUE * BATCH]


def test_self_similarity_against_a_loop_where_it_is_not_solved():
    objective = build(temperature=1.0)
    first, second = torch.randn(2, BATCH, DIM, generator=torch.manual_seed(5)).double()
    queue = directions(torch.randn(2 * BATCH, DIM).double())
    objective.keys[: 2 * BATCH] = torch.stack(queue)
    objective.state[1] = 2 * BATCH
    query, keys = torch.stack(directions(first)), torch.stack(directions(second))
    value = objective._dance(query, keys)
    assert math.isclose(value.item(), naive_dance(query, keys, queue, 1.0), rel_tol=1e-9)
    assert value.item() > 0.1


def test_weights_of_the_queue():
    torch.manual_seed(2)
    similarity = torch.rand(3, 9).double() * 2 - 1
    similarity[1] = -0.5  # all beyond the cutoff
    valid = torch.arange(9) < 7
    weights = inverse_density_weights(similarity, valid, dim=DIM)
    for row, weight in zip(similarity, weights, strict=True):
        assert weight[:7].tolist() == pytest.approx(naive_rarity(row[:7].tolist()), rel=1e-9, abs=1e-30)
        assert weight[7:].tolist() == [0, 0]
    assert inverse_density_weights(similarity, torch.zeros(9, dtype=torch.bool), dim=DIM).abs().sum() == 0


def test_column_weights_match_naive_loop():
    """As ooDML's script: shifted by the maximum of the matrix, cut, floored, and normalized over the batch."""
    torch.manual_seed(2)
    similarity = torch.rand(4, 9).double() * 2 - 1
    similarity[:, 1] = -0.5  # all beyond the cutoff
    logs = [[(2 - DIM) * math.log(d) - (DIM - 3) / 2 * math.log(1 - d * d / 4) for d in row] for row in naive_distances(similarity)]
    top = max(map(max, logs))
    raw = [
        [max(math.exp(log - top) if d <= 1.4 else 0, 1e-45) for log, d in zip(*rows, strict=True)]
        for rows in zip(logs, naive_distances(similarity), strict=True)
    ]
    expected = [[w / sum(row[column] for row in raw) for column, w in enumerate(row)] for row in raw]
    found = inverse_density_weights(similarity, torch.ones(9, dtype=torch.bool), dim=DIM, columns=True)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-30)
    assert found[:, 1].tolist() == pytest.approx([0.25] * 4)
    assert not torch.allclose(found, inverse_density_weights(similarity, torch.ones(9, dtype=torch.bool), dim=DIM))


def naive_distances(similarity):
    return [[max(0.5, math.sqrt(2 - 2 * s)) for s in row] for row in similarity.tolist()]


def test_column_weights_reach_the_self_similarity_term():
    queue = torch.stack(directions(torch.randn(2 * BATCH, DIM, generator=torch.manual_seed(7)).double()))
    first, second = torch.randn(2, BATCH, DIM, generator=torch.manual_seed(5)).double()
    query, keys = torch.stack(directions(first)), torch.stack(directions(second))
    objective = build(temperature=1.0, column_weights=True)
    objective.keys[: 2 * BATCH] = queue
    objective.state[1] = 2 * BATCH
    weights = inverse_density_weights(query @ queue.T, torch.ones(2 * BATCH, dtype=torch.bool), dim=DIM, columns=True)
    logits = torch.cat([(query * keys).sum(1, keepdim=True), weights * (query @ queue.T)], 1)
    expected = torch.nn.functional.cross_entropy(logits, torch.zeros(BATCH, dtype=torch.int64))
    assert math.isclose(objective._dance(query, keys).item(), expected.item(), rel_tol=1e-9)


def test_the_adversary_is_its_equation():
    objective, given = build(rho=7.0), output()
    disc, *others = [directions(branch) for branch in given.branches]
    total = 0.0
    for regressor, source in zip(objective.regressors, others, strict=True):
        first, _, last = regressor
        for s, t in zip(source, disc, strict=True):
            guess = last.weight @ (first.weight @ s + first.bias).clamp_min(0) + last.bias
            guess = guess / guess.norm()
            total += sum((t[k] * guess[k]).item() ** 2 for k in range(DIM)) / DIM / BATCH
    assert math.isclose(objective(given, LABELS)["adversary"].item(), -7.0 * total, rel_tol=1e-9)


def test_reversed_gradients_have_the_opposite_sign():
    """To the regressor the gradient is that of the plain expression, to both heads its opposite."""
    objective = build()
    regressor = objective.regressors[0]
    source, target = (torch.randn(BATCH, DIM).double().requires_grad_() for _ in range(2))
    inputs = [source, target, *regressor.parameters()]
    reversed_ = torch.autograd.grad(likeness(regressor, source, target), inputs)
    guess = torch.nn.functional.normalize(regressor(torch.nn.functional.normalize(source)))
    plain = torch.autograd.grad((torch.nn.functional.normalize(target) * guess).square().mean(), inputs)
    assert plain[0].abs().max() > 1e-6
    for number, (ours, theirs) in enumerate(zip(reversed_, plain, strict=True)):
        torch.testing.assert_close(ours, -theirs if number < 2 else theirs, rtol=1e-9, atol=1e-15)


def test_the_plain_terms():
    """The discriminative head is the run's loss; the shared head the auxiliary on labels in another order; each with its weight."""
    objective, given = build(shared=0.3, auxiliary="margin"), output()
    shared_loss, dice = copy.deepcopy(objective.shared_loss), copy.deepcopy(objective.dice)
    terms = objective(given, LABELS)
    assert math.isclose(terms["loss"].item(), create("losses", "multi_similarity")(given.branches[0], LABELS).item(), rel_tol=1e-9)
    order = dice(BATCH).argsort()
    assert sorted(order.tolist()) == list(range(BATCH))
    assert LABELS[order].tolist() != LABELS.tolist()
    assert math.isclose(terms["shared"].item(), 0.3 * shared_loss(given.branches[1], LABELS[order]).item(), rel_tol=1e-9)


@pytest.mark.parametrize("auxiliary", ["margin", "margin(or_count=True)"])
@pytest.mark.parametrize("choice", ["all", "distinct"])
def test_intra_term_matches_naive_loop(choice, auxiliary):
    """With `all`, a triplet whose negative is the anchor adds its pull, and a push of beta + margin."""
    objective, given = build(intra=0.4, auxiliary=auxiliary, intra_triplets=choice), output()
    within = copy.deepcopy(objective.intra_loss.miner)
    value = objective(given, LABELS)["intra"].item()
    z = directions(given.branches[3])
    mined = within(torch.zeros(BATCH, BATCH), match(LABELS, dim=DIM))
    beta = objective.intra_loss.beta[0].item()  # float32's 1.2
    hinges, triplets, dropped = [], 0, 0
    for a, p, n in zip(*(x.tolist() for x in (mined.anchor, mined.positive, mined.negative)), strict=True):
        dropped += a == n
        if a == n and choice == "distinct":
            continue
        pull = math.sqrt(2 - 2 * float(z[a] @ z[p]) + 1e-8) if a != p else 1e-4
        push = math.sqrt(2 - 2 * float(z[a] @ z[n]) + 1e-8) if a != n else 1e-4
        active = [hinge for hinge in (pull - beta + 0.2, beta - push + 0.2) if hinge > 0]
        hinges += active
        triplets += bool(active)
    assert dropped > 0
    expected = 0.4 * sum(hinges) / (triplets if "or_count" in auxiliary else len(hinges))
    assert math.isclose(value, expected, rel_tol=1e-9)


def test_intra_gradient_of_anchor_as_negative_is_zero():
    """d(a, a) is constant. In float32 its rounding errors, divided by the distance, must not reach the head."""
    torch.manual_seed(0)
    objective = build(intra_triplets="all").float()
    branch = torch.randn(4, DIM).requires_grad_()
    labels = torch.arange(4)  # one sample per class: anchor, positive and negative are the same
    value = objective.intra_loss(branch, labels)
    value.backward()
    assert value.item() == pytest.approx(1.4, abs=1e-3)
    assert branch.grad.abs().max() == 0


def test_permuted_intra_term_is_auxiliary_on_other_labels():
    objective, given = build(intra=0.4, intra_triplets="permuted"), output()
    intra_loss, dice = copy.deepcopy(objective.intra_loss), copy.deepcopy(objective.dice)
    value = objective(given, LABELS)["intra"].item()
    first, second = dice(BATCH).argsort(), dice(BATCH).argsort()
    assert first.tolist() != second.tolist()  # not the labels of the shared head
    labels = LABELS[second]
    z, beta = directions(given.branches[3]), 1.2
    mined = copy.deepcopy(intra_loss.miner)(torch.stack(z) @ torch.stack(z).T, match(labels, dim=DIM))
    assert (labels[mined.anchor] != labels[mined.negative]).all()
    hinges = []
    for a, p, n in zip(mined.anchor.tolist(), mined.positive.tolist(), mined.negative.tolist(), strict=True):
        hinges += [math.sqrt(2 - 2 * float(z[a] @ z[p])) - beta + 0.2, beta - math.sqrt(2 - 2 * float(z[a] @ z[n])) + 0.2]
    active = [hinge for hinge in hinges if hinge > 0]
    assert math.isclose(value, 0.4 * sum(active) / len(active), rel_tol=1e-6)


@pytest.mark.parametrize("distinct", [False, True])
def test_triplets_within_a_class(distinct):
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    pairs, within = match(labels, dim=DIM), _Within(distinct=distinct)
    counts = torch.zeros(4)
    for _ in range(300):
        mined = within(torch.zeros(8, 8), pairs)
        assert (labels[mined.anchor] == labels[mined.positive]).all()
        assert (labels[mined.anchor] == labels[mined.negative]).all()
        assert (mined.valid == ((mined.negative != mined.anchor) | (not distinct))).all()
        counts += torch.bincount(labels[mined.anchor], minlength=4)
    assert (counts / counts.sum() - 0.25).abs().max() < 0.03  # uniform over classes of any size


def test_the_copy_follows_as_a_moving_average():
    student, objective = model(), build(momentum=0.9)
    objective.meet(student)
    before = {key: value.clone() for key, value in objective.teacher.state_dict().items()}
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += torch.randn_like(parameter)
    student.train()
    student(torch.randn(4, 3, 32, 32).double())  # moves BatchNorm's statistics
    with torch.no_grad():
        objective.stepped()
    names = {name for name, _ in student.named_parameters()}
    for key, value in student.state_dict().items():
        expected = 0.9 * before[key] + 0.1 * value if key in names else value
        torch.testing.assert_close(objective.teacher.state_dict()[key], expected, rtol=1e-9, atol=1e-12)


def test_copy_follows_a_network_in_half_precision():
    student, objective = model().float(), build(momentum=0.5)
    objective.meet(student)
    student.bfloat16()  # `precision = "bf16-true"` converts the network after that
    expected = {name: (objective.teacher.get_parameter(name) + value.float() * 3) / 2 for name, value in student.named_parameters()}
    with torch.no_grad():
        for parameter in student.parameters():
            parameter *= 3
        objective.stepped()
    for name, value in expected.items():
        torch.testing.assert_close(objective.teacher.get_parameter(name), value, rtol=0.01, atol=1e-6)


def test_keys_are_the_second_view_through_the_copy():
    student, objective = model(), build()
    objective.meet(student)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()  # the student has moved away; the copy has not
    objective.train()
    assert not objective.teacher.backbone.training
    torch.manual_seed(6)
    view = torch.randn(BATCH, 3, 32, 32).double()
    objective(output(views=(view,)), LABELS)
    expected = objective.teacher(view)[2][2]
    torch.testing.assert_close(objective.keys[:BATCH], expected / expected.norm(dim=1, keepdim=True), rtol=1e-9, atol=1e-12)


def test_the_copy_is_in_the_checkpoint_and_not_in_the_optimiser():
    student, objective = model(), build(lr=0.25)
    objective.meet(student)
    assert {f"teacher.{key}" for key in student.state_dict()} <= set(objective.state_dict())
    groups = build_optimizer(load(), student, objective).param_groups
    learnt = {id(parameter) for group in groups for parameter in group["params"]}
    assert not learnt & {id(parameter) for parameter in objective.teacher.parameters()}
    assert {group["lr"] for group in groups if group["name"].startswith("regressors")} == {0.25}
    assert len(learnt) == sum(len(list(part.parameters())) for part in (student, objective)) - len(list(objective.teacher.parameters()))


def test_other_heads_and_losses_are_refused():
    with pytest.raises(UnimetricError, match="four equal branches"):
        Diva(num_classes=4, branches=(8,), batch_size=4)
    with pytest.raises(UnimetricError, match="reads no triplets"):
        build(auxiliary="proxy_anchor")
    with pytest.raises(UnimetricError, match="`queue` must be at least 1, got 0"):
        build(queue=0)
    with pytest.raises(UnimetricError, match="`intra_triplets` must be one of `all`, `distinct`, `permuted`"):
        build(intra_triplets="some")
