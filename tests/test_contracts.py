"""What every part of a kind must do, for every file in its folder: a new one is covered by being there.

One section a kind. A part that a law does not hold for is left out by a rule that is stated, not by a list of names where that can be
helped.
"""

import copy
import inspect
import re

import pytest
import torch

from unimetric.cli.catalogue import source
from unimetric.geometry import CounterRNG, Memory, Pairs, Triplets, compare
from unimetric.objectives import Output
from unimetric.runs.model import Model
from unimetric.spec import bind, create, find, names
from unimetric.training.capture import compiled

CLASSES, DIM = 6, 8

#: What a run offers, in small.
OFFERED = {"num_classes": CLASSES, "dim": DIM, "branches": (DIM,), "features": DIM, "batch_size": 12, "seed": 0}

KINDS = ("losses", "miners", "objectives")
PARTS = [(kind, name) for kind in KINDS for name in names(kind)]

LABELS = {
    "pairs of a class": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5],
    "unequal classes": [0, 0, 0, 0, 0, 1, 1, 2, 3, 3, 5, 5],
}

#: Batches that a loss must survive: their labels, and what happens to their embeddings.
DEGENERATE = {
    "one class": ([2] * 8, lambda z: z),
    "all singletons": (list(range(6)), lambda z: z),
    "duplicates": ([0, 0, 1, 1, 2, 2], lambda z: z[:1].expand(6, DIM)),
    "pairs of duplicates": ([0, 0, 1, 1, 2, 2], lambda z: z[::2].repeat_interleave(2, 0)),
    "opposites": ([0, 0, 1, 1], lambda z: torch.cat([z[:2], -z[:2]])),
    "zero vectors": ([0, 0, 1, 1, 2, 2], torch.zeros_like),
    "some zero vectors": ([0, 0, 1, 1, 2, 2], lambda z: z * torch.tensor([0, 1, 1, 1, 0, 1])[:, None]),
    "tiny and huge": ([0, 0, 1, 1, 2, 2], lambda z: z * torch.tensor([1e-6, 1e3, 1, 1, 1e3, 1e-6])[:, None]),
    "one sample": ([3], lambda z: z),
    "two samples": ([3, 3], lambda z: z),
}


def batch(labels="unequal classes", dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    y = torch.tensor(LABELS[labels])
    return torch.randn(len(y), DIM, dtype=dtype), y


def degenerate(case):
    labels, change = DEGENERATE[case]
    torch.manual_seed(1)
    return change(torch.randn(len(labels), DIM)).clone().requires_grad_(), torch.tensor(labels)


def build(kind, name, **offered):
    """From its defaults, always with the same weights."""
    torch.manual_seed(0)
    return create(kind, name, **(OFFERED | offered))


def once(part, *inputs):
    """A part's answer from a fresh state: what it draws and what it remembers starts again."""
    return copy.deepcopy(part)(*inputs)


def check_gradients(value, inputs, part):
    value.backward()
    assert inputs.grad is None or inputs.grad.isfinite().all()
    for parameter in part.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


def arguments(part):
    """What its own constructor takes; one without a constructor takes nothing, though inspect shows nn.Module's `*args`."""
    return inspect.signature(part).parameters if inspect.isfunction(part) or "__init__" in vars(part) else {}


# --- every kind: what is written about a part ------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in ("losses", "miners") for name in names(kind)])
def test_docstring_has_a_summary_and_its_sections(kind, name):
    text = inspect.getdoc(find(kind, name))
    summary, blank, *_ = text.split("\n")
    assert len(summary) <= 88 and summary.endswith(".") and not blank, summary
    sections = re.findall(r"^([A-Z][\w ]+):$", text, re.MULTILINE)
    order = ["Differs from the paper", "Reference", "Args", "Shape"]
    assert sections == [section for section in order if section in sections]
    assert {"Reference", "Shape"} <= set(sections)
    assert source(text) in " ".join(text.partition("Reference:")[2].split())
    assert re.fullmatch(r".+ \(.+ (19|20)\d\d\)", source(text))


def test_source_is_the_reference_or_else_the_first_paragraph():
    def cited():
        """Loss of Smith et al. 1999.

        Reference:
            A title that is long
            (Doe et al., ICML 2020); eq. 3 of Roe et al. 2021.

        Args:
            x: None of (Poe, CVPR 2022).
        """

    def uncited():
        """Loss (Smith, CVPR 1999) with a margin."""

    def neither():
        """A loss. It has no paper."""

    assert source(inspect.getdoc(cited)) == "A title that is long (Doe et al., ICML 2020)"
    assert source(inspect.getdoc(uncited)) == "Loss (Smith, CVPR 1999)"
    assert source(inspect.getdoc(neither)) == "A loss"


@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_documents_every_argument(kind, name):
    part = find(kind, name)
    written = (inspect.getdoc(part) or "").partition("Args:")[2]
    documented = {word for line in re.findall(r"^    ([\w, ]+):", written, re.MULTILINE) for word in line.split(", ")}
    assert documented == set(arguments(part)), f"{kind}/{name}.py: `Args:` and the signature disagree"


@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_arguments_are_keywords_with_types_and_defaults(kind, name):
    """All but what only a run knows has a default, and nothing is swallowed by **kwargs."""
    for parameter in arguments(find(kind, name)).values():
        assert parameter.kind is parameter.KEYWORD_ONLY, parameter
        assert parameter.annotation is not parameter.empty, parameter
        assert parameter.default is not parameter.empty or parameter.name in OFFERED, parameter


# --- losses ----------------------------------------------------------------------------------------------------------

LOSSES = names("losses")
FREE = [name for name in LOSSES if find("losses", name).family != "proxy"]  # of proxies; they know no class by its number
PROXIES = [name for name in LOSSES if name not in FREE]

#: Losses that read single components of an embedding: the variance over them changes as the axes do.
AXES = {"snr"}


def without_chance(name):
    """The loss with every tuple instead of drawn ones, where it can read them; skipped where it draws all the same."""
    reads = getattr(find("losses", name), "reads", ())
    loss = build("losses", name, **({"miner": "all"} if Pairs in reads else {}))
    if any(isinstance(module, CounterRNG) for module in loss.modules()):
        pytest.skip("draws by position in the batch")
    return loss


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_scalar_finite_and_differentiable(name, labels):
    z, y = batch(labels)
    loss = build("losses", name)
    assert loss.family in {"pair", "tuple", "proxy"}
    value = loss(z.requires_grad_(), y)
    assert value.shape == ()
    assert value.isfinite()
    check_gradients(value, z, loss)
    assert z.grad.abs().sum() > 0
    assert all(parameter.grad is not None for parameter in loss.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("case", DEGENERATE)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_survives_degenerate_batches(name, case):
    z, y = degenerate(case)
    loss = build("losses", name)
    value = loss(z, y)
    assert value.isfinite()
    check_gradients(value, z, loss)


@pytest.mark.parametrize("name", [name for name in LOSSES if Pairs in getattr(find("losses", name), "reads", ())])
def test_loss_survives_degenerate_batches_without_mining(name):
    for case in DEGENERATE:
        z, y = degenerate(case)
        loss = build("losses", name, miner="all")
        value = loss(z, y)
        assert value.isfinite(), case
        check_gradients(value, z, loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_takes_half_precision(name, dtype):
    """Rounded where it enters, and nowhere after."""
    z, y = batch()
    z = z.to(dtype).requires_grad_()
    loss = build("losses", name)
    value, expected = once(loss, z, y), once(loss, z.float(), y)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    check_gradients(value, z, loss)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_keeps_its_parameters_in_float32_under_autocast(name):
    z, y = batch()
    loss = build("losses", name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(z.requires_grad_(), y)
    assert value.isfinite()
    check_gradients(value, z, loss)
    for parameter in loss.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is None or parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_blind_to_order(name):
    """With two samples a class: `hyperbolic` and its kin number a class's samples in the order in which they come."""
    z, y = batch("pairs of a class", torch.float64)
    loss = without_chance(name).double()
    order = torch.randperm(len(y))
    assert once(loss, z[order], y[order]).item() == pytest.approx(once(loss, z, y).item(), rel=1e-9)


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_blind_to_the_names_of_classes(name, labels):
    """Where something is learnt for each class, it takes the new name along."""
    z, y = batch(labels, torch.float64)
    loss = build("losses", name).double()
    renamed = copy.deepcopy(loss)
    torch.manual_seed(2)
    new = torch.randperm(CLASSES)
    with torch.no_grad():
        for tensor in (*renamed.parameters(), *renamed.buffers()):
            if tensor.dim() > 0 and len(tensor) == CLASSES:
                tensor[new] = tensor.clone()
    assert once(renamed, z, new[y]).item() == pytest.approx(once(loss, z, y).item(), rel=1e-9)


@pytest.mark.parametrize("name", FREE)
def test_loss_tells_huge_labels_apart(name):
    """Above 2^24 neighbouring numbers are one in float32."""
    z, y = batch()
    loss = build("losses", name, num_classes=None)
    assert once(loss, z, y + 2**24).item() == pytest.approx(once(loss, z, y).item(), rel=1e-6)
    assert once(loss, z, y + 2**53).item() == pytest.approx(once(loss, z, y).item(), rel=1e-6)


@pytest.mark.parametrize("name", [name for name in FREE if name not in AXES])
def test_loss_is_blind_to_rotation(name):
    z, y = batch(dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(DIM, DIM, dtype=torch.float64)).Q
    loss = build("losses", name).double()
    assert once(loss, z @ turn, y).item() == pytest.approx(once(loss, z, y).item(), rel=1e-9)


@pytest.mark.parametrize("name", PROXIES)
def test_loss_of_proxies_has_a_rate_of_its_own_and_needs_no_memory(name):
    z, y = batch()
    loss = build("losses", name)
    assert 0 < loss.lr <= 1
    memory = Memory(z, y, torch.ones(len(y), dtype=torch.bool), torch.arange(len(y)))
    assert once(loss, z, y, memory) == once(loss, z, y)


@pytest.mark.parametrize("name", FREE)
def test_loss_against_a_memory_that_is_the_batch(name):
    """Then the memory changes nothing, but that its side has no gradient. Empty slots behind it change nothing either."""
    z, y = batch(dtype=torch.float64)
    loss = build("losses", name).double()
    valid = torch.arange(len(y) + 5) < len(y)
    memory = Memory(torch.cat([z, z[:5]]), torch.cat([y, y[:5]]), valid, torch.arange(len(y)))
    assert once(loss, z, y, memory).item() == pytest.approx(once(loss, z, y).item(), rel=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_captures_as_one_graph(name):
    z, y = batch()
    eager = build("losses", name)
    captured = copy.deepcopy(eager)
    torch._dynamo.reset()
    first, second = z.clone().requires_grad_(), z.clone().requires_grad_()
    value = torch.compile(captured, fullgraph=True, backend="aot_eager")(first, y)
    expected = eager(second, y)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    value.backward()
    expected.backward()
    assert torch.allclose(first.grad, second.grad, rtol=1e-4, atol=1e-6)


@pytest.fixture
def uncompiled(monkeypatch):
    """The joint graph of value and gradient runs as it was captured: what a compiler makes of it is not the losses' affair."""
    monkeypatch.setattr("unimetric.training.capture._inductor", lambda graph, inputs, options: graph)
    torch._dynamo.reset()


def check_one_graph(loss, batches, rel=1e-9):
    """Value, gradients and state, over several steps, are those of the loss itself. Each batch has its absolute tolerance."""
    captured = copy.deepcopy(loss)
    minimise = compiled(captured)
    for z, y, near in batches:
        first, second = z.detach().clone().requires_grad_(), z.detach().clone().requires_grad_()
        value, expected = minimise(first, y), loss(second, y)
        assert type(value.grad_fn).__name__ == "KnownBackward"
        assert value.item() == pytest.approx(expected.item(), rel=rel, abs=near)
        for module, number in ((captured, value), (loss, expected)):
            module.zero_grad()
            (-3 * number).backward()
        found = [first.grad, *(parameter.grad for parameter in captured.parameters())]
        for one, other in zip(found, [second.grad, *(parameter.grad for parameter in loss.parameters())], strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.allclose(one, other, rtol=rel, atol=near * max(1, other.abs().max().item()))
        for one, other in zip(captured.buffers(), loss.buffers(), strict=True):
            assert torch.allclose(one, other, rtol=rel)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_its_gradient_are_one_graph(name, uncompiled):
    """In float64, of ordinary batches and of such as go wrong; and in bfloat16. Batches of one shape are compiled once."""
    loss = build("losses", name)
    some = torch.tensor([0, 1, 2, 5, 6, 7])  # three, two and one of a class
    ordinary = [(z[some], y[some], 1e-9) for z, y in (batch(dtype=torch.float64, seed=seed) for seed in range(3))]
    # Where points coincide, gradients that should be zero are differences of large numbers.
    sixes = [(*degenerate(case), 1e-8) for case, (labels, _) in DEGENERATE.items() if len(labels) == 6]
    check_one_graph(copy.deepcopy(loss).double(), [*ordinary, *((z.double(), y, near) for z, y, near in sixes)])
    check_one_graph(loss, [(*batch(dtype=torch.bfloat16), 1e-2)], rel=1e-2)


# --- miners ----------------------------------------------------------------------------------------------------------

MINERS = names("miners")


@pytest.mark.parametrize("name", MINERS)
def test_miner_is_part_of_the_one_graph(name, uncompiled):
    """What it draws goes on from step to step as without the compiler."""
    batches = [(*batch(dtype=torch.float64, seed=seed), 1e-9) for seed in range(3)]
    check_one_graph(build("losses", "triplet", miner=name).double(), batches)


def check_mined(miner, mined, pairs):
    """Indices within the matrix; of what counts, positives are of the class or the anchor itself, and negatives are not the anchor."""
    assert type(mined) is miner.gives
    if isinstance(mined, Pairs):
        assert not (mined.positive & ~pairs.positive).any()
        assert not (mined.negative & ~pairs.negative).any()
        return
    rows, columns = pairs.positive.shape
    anchor, positive, negative = mined.anchor, mined.positive, mined.negative
    assert len(anchor) == len(positive) == len(negative) == len(mined.valid)
    assert ((anchor >= 0) & (anchor < rows)).all()
    assert ((positive >= 0) & (positive < columns) & (negative >= 0) & (negative < columns)).all()
    own = pairs.own[anchor]
    assert (pairs.positive[anchor, positive] | (positive == own))[mined.valid].all()
    assert (pairs.negative | pairs.positive)[anchor, negative][mined.valid].all()


@pytest.mark.parametrize("name", MINERS)
def test_miner_gives_what_it_says(name):
    miner = build("miners", name)
    assert miner.gives in (Pairs, Triplets)
    for labels in LABELS:
        similarity, pairs = compare(*batch(labels))
        check_mined(miner, miner(similarity, pairs), pairs)


@pytest.mark.parametrize("case", DEGENERATE)
@pytest.mark.parametrize("name", MINERS)
def test_miner_survives_degenerate_batches(name, case):
    z, y = degenerate(case)
    similarity, pairs = compare(z.detach(), y)
    miner = build("miners", name)
    check_mined(miner, miner(similarity, pairs), pairs)


@pytest.mark.parametrize("name", MINERS)
def test_miner_leaves_the_empty_slots_of_a_memory(name):
    z, y = batch()
    torch.manual_seed(4)
    memory = Memory(torch.randn(30, DIM), torch.randint(0, CLASSES, (30,)), torch.arange(30) < 20, torch.arange(len(y)) + 3)
    memory.embeddings[memory.own], memory.labels[memory.own] = z, y
    similarity, pairs = compare(z, y, memory)
    miner = build("miners", name)
    check_mined(miner, miner(similarity, pairs), pairs)


@pytest.mark.parametrize("name", MINERS)
def test_miner_captures_as_one_graph(name):
    similarity, pairs = compare(*batch())
    eager = build("miners", name)
    captured = copy.deepcopy(eager)
    torch._dynamo.reset()
    mined = torch.compile(captured, fullgraph=True, backend="aot_eager")(similarity, pairs)
    expected = eager(similarity, pairs)
    for key, tensor in vars(expected).items():
        assert tensor is getattr(mined, key) or torch.equal(torch.as_tensor(tensor), torch.as_tensor(getattr(mined, key)))


# --- objectives ------------------------------------------------------------------------------------------------------

OBJECTIVES = names("objectives")


def introduced(name, **offered):
    """An objective from its defaults that has met a small model, whose head is the one of the same name where there is one."""
    torch.manual_seed(0)
    head = create("heads", f"{name if name in names('heads') else 'linear'}(dim={DIM})", features=DIM)
    model = Model(create("backbones", f"small(channels={DIM})"), head)
    objective = build("objectives", name, **({"dim": model.dim, "branches": model.dims} | offered))
    if hasattr(objective, "meet"):
        objective.meet(model)
    objective.dims = model.dims
    return begun(objective)


def begun(objective):
    if hasattr(objective, "begin"):
        objective.begin()
    return objective


def output(z, objective):
    """A model's whole answer of which everything follows from the embeddings, so that one gradient tells of all."""
    tokens = torch.stack([z, z.roll(1, 1), z.roll(2, 1)], 1)
    images = z[:, :3, None, None].expand(-1, 3, 16, 16)
    turns = [torch.randn(DIM, dim, generator=torch.Generator().manual_seed(number)) for number, dim in enumerate(objective.dims)]
    branches = (z, *(z @ turn for turn in turns[1:]))
    return Output(z, tokens, images, branches, (images.flip(0),) * (getattr(objective, "views", 1) - 1))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_gives_named_terms(name):
    z, y = batch()
    objective = introduced(name)
    terms = objective(output(z.requires_grad_(), objective), y)
    assert terms
    assert all(isinstance(key, str) and term.shape == () and term.isfinite() for key, term in terms.items())
    check_gradients(sum(terms.values()), z, objective)
    assert z.grad.abs().sum() > 0


@pytest.mark.parametrize("case", DEGENERATE)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_survives_degenerate_batches(name, case):
    z, y = degenerate(case)
    objective = introduced(name)
    total = sum(objective(output(z, objective), y).values())
    assert total.isfinite()
    check_gradients(total, z, objective)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_goes_on_from_a_checkpoint(name):
    z, y = batch()
    objective, resumed = introduced(name), introduced(name)
    objective(output(z, objective), y)
    if hasattr(objective, "stepped"):
        with torch.no_grad():
            objective.stepped()
    resumed.load_state_dict(objective.state_dict())
    for key, optimizer in getattr(objective, "optimizers", {}).items():
        resumed.optimizers[key].load_state_dict(optimizer.state_dict())
    assert {key: term.item() for key, term in begun(objective)(output(z, objective), y).items()} == {
        key: term.item() for key, term in begun(resumed)(output(z, objective), y).items()
    }


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_captures_as_one_graph(name):
    z, y = batch()
    eager, captured = introduced(name), introduced(name)
    torch._dynamo.reset()
    terms = torch.compile(captured, fullgraph=True, backend="aot_eager")(output(z, eager), y)
    for key, term in eager(output(z, eager), y).items():
        assert terms[key].item() == pytest.approx(term.item(), rel=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_takes_the_loss_and_the_miner_of_the_run(name):
    _, given = bind("objectives", name, **OFFERED, loss="multi_similarity", miner="all")
    assert {"loss", "miner"} <= set(given), f"objectives/{name}.py: ask for `loss` and `miner`"
    objective = introduced(name, loss="multi_similarity", miner="all")
    assert objective(output(batch()[0], objective), batch()[1])
