"""What every sampler must do, for every file in `samplers/`: a new one is covered by being there."""

import inspect
import pickle
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from unimetric.errors import UnimetricError
from unimetric.samplers import rank_slice
from unimetric.spec import create, find, names

SAMPLERS = names("samplers")
EMBEDDED = [name for name in SAMPLERS if find("samplers", name).needs_embeddings]

#: Training sets, as the sizes of their classes.
SETS = {
    "equal classes": [12] * 20,
    "unequal classes": [3, 40, 7, 2, 19, 5, 5, 31, 8, 8, 2, 60, 4, 9, 12],
    "few classes": [50, 30, 40],
    "one class": [70],
    "singletons": [1] * 60,
    "smaller than a batch": [2, 5, 1, 3],
    "one row": [1],
}
BATCH, DIM = 24, 8


def labels_of(sizes):
    """Any integers will do as labels, in any order."""
    labels = np.repeat(np.arange(len(sizes)) * 7 - 20, sizes)
    return np.random.default_rng(3).permutation(labels)


def embed(rows, time=0):
    """A stand-in for a network: an embedding of each row that changes with time."""
    angle = (rows[:, None] + 1) * (np.arange(DIM) + 1.3) * (1 + 0.1 * time)
    return torch.from_numpy(np.sin(angle)).float()


def build(name, labels=None, *, seed=0, batch_size=BATCH):
    labels = labels_of(SETS["unequal classes"]) if labels is None else labels
    sampler = create("samplers", name, labels=labels, batch_size=batch_size, seed=seed)
    if sampler.needs_embeddings:
        sampler.fill(embed(np.arange(len(labels))))
    return sampler


@pytest.mark.parametrize("sizes", SETS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_batch_is_whole(name, sizes):
    labels = labels_of(SETS[sizes])
    sampler = build(name, labels)
    assert len(sampler) == max(1, len(labels) // BATCH)
    drawn = list(sampler)
    assert len(drawn) == len(sampler)
    for rows in drawn:
        assert rows.shape == (BATCH,) and rows.dtype == np.int64
        assert rows.min() >= 0 and rows.max() < len(labels)


@pytest.mark.parametrize("name", SAMPLERS)
def test_seed_epoch_and_step_decide(name):
    sampler, again, other = build(name), build(name), build(name, seed=1)
    first = np.stack(list(sampler))
    assert (first == np.stack(list(again))).all()
    assert (first == np.stack([again.batch(step) for step in reversed(range(len(again)))])[::-1]).all()
    assert len({rows.tobytes() for rows in first}) == len(first)
    assert not (first == np.stack(list(other))).all()
    sampler.epoch = again.epoch = 1
    second = np.stack(list(sampler))
    assert not (first == second).all()
    assert (second == np.stack(list(again))).all()


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_batch_is_the_callers_own(name):
    sampler = build(name)
    before = sampler.batch(1)
    sampler.batch(1)[:] = -1
    assert (sampler.batch(1) == before).all()


@pytest.mark.parametrize("name", SAMPLERS)
def test_no_row_twice_where_classes_are_large_enough(name):
    for rows in build(name, labels_of(SETS["equal classes"])):
        assert len(set(rows)) == BATCH


@pytest.mark.parametrize("sizes", ["equal classes", "unequal classes", "few classes", "singletons"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_class_and_row_is_reached(name, sizes):
    labels = labels_of(SETS[sizes])
    sampler, seen = build(name, labels), set()
    for epoch in range(100):
        sampler.epoch = epoch
        if sampler.needs_embeddings:  # the network changes, and with it what lies far out
            sampler.fill(embed(np.arange(len(labels)), epoch))
        seen.update(np.concatenate(list(sampler)).tolist())
        if len(seen) == len(labels):
            break
    assert len(seen) == len(labels)


def engine(sampler, *, start, stop, ahead, trained):
    """Train from step to step of the run, loading so many batches ahead; return after the last refresh, before anything is asked."""

    def ask(number):
        sampler.epoch, step = divmod(number, len(sampler))
        return sampler.batch(step)

    loaded = [ask(number) for number in range(start, start + ahead)]
    for number in range(start, stop):
        loaded.append(ask(number + ahead))
        rows = loaded.pop(0)
        if sampler.needs_embeddings:
            sampler.refresh(torch.from_numpy(rows), embed(rows, number + 1))
        trained.append(rows)


@pytest.mark.parametrize("ahead", [0, 1, 5])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_resumed_run_trains_on_the_same_batches(name, ahead):
    unbroken, length = [], len(build(name))
    engine(build(name), start=0, stop=3 * length, ahead=ahead, trained=unbroken)
    for stop in (1, length - 1, length, length + 4):
        before, after, resumed = build(name), build(name), []
        engine(before, start=0, stop=stop, ahead=ahead, trained=resumed)
        after.load_state_dict(load(save(before.state_dict())) if before.needs_embeddings else before.state_dict())
        engine(after, start=stop, stop=3 * length, ahead=ahead, trained=resumed)
        assert all((one == other).all() for one, other in zip(unbroken, resumed, strict=True))


@pytest.mark.parametrize("name", EMBEDDED)
def test_embeddings_matter(name):
    changed, still = build(name), build(name)
    changed.fill(embed(np.arange(len(labels_of(SETS["unequal classes"]))), 5))
    assert not (np.stack(list(changed)) == np.stack(list(still))).all()


@pytest.mark.parametrize("name", EMBEDDED)
def test_a_sampler_without_embeddings_says_what_to_do(name):
    sampler = create("samplers", name, labels=np.arange(50), batch_size=10, seed=0)
    assert sampler.state_dict() == {}
    with pytest.raises(UnimetricError, match=r"sampler\.fill"):
        sampler.batch(0)
    with pytest.raises(UnimetricError, match="50 training rows"):
        sampler.fill(torch.randn(49, DIM))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_together_draw_what_one_draws(name, world):
    ranks, alone = [build(name) for _ in range(world)], build(name)
    for step in range(len(alone)):
        shares = [rank_slice(sampler.batch(step), rank, world) for rank, sampler in enumerate(ranks)]
        assert {len(part) for part in shares} == {BATCH // world}
        assert (np.concatenate(shares) == alone.batch(step)).all()


def test_a_batch_that_ranks_cannot_share_is_refused():
    with pytest.raises(UnimetricError, match="batch_size=110"):
        rank_slice(np.arange(112), 0, 5)


@pytest.mark.parametrize("name", SAMPLERS)
def test_cites_and_documents_every_argument(name):
    part = find("samplers", name)
    text = inspect.getdoc(part)
    assert re.search(r"(et al\.|Kwak).*(\d{4}|appendix)", text, re.DOTALL), "cites no source"
    listed = text.split("Args:")[1]
    for argument, parameter in inspect.signature(part).parameters.items():
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert re.search(rf"^\s+{argument}: ", listed, re.MULTILINE), f"{argument} is not documented"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", EMBEDDED)
def test_the_gpu_chooses_as_the_cpu_does_and_refresh_waits_for_nothing(name):
    labels = np.random.default_rng(0).integers(100, size=4000)
    points = torch.randn(4000, 128, generator=torch.Generator().manual_seed(0))
    here, there = (create("samplers", name, labels=labels, batch_size=112, seed=0) for _ in range(2))
    here.fill(points)
    there.fill(points.cuda())
    there.batch(0)  # the first choice builds what is kept
    there.fill(points.cuda())
    same = 0
    for step in range(len(here)):
        rows = here.batch(step)
        same += (rows == there.batch(step)).all()
        new = torch.randn(112, 128, generator=torch.Generator().manual_seed(step))
        here.refresh(torch.from_numpy(rows), new)
        new, on_device = new.cuda(), torch.from_numpy(rows).cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            there.refresh(on_device, new)
            there.bank._launch((0, step))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert same >= 0.9 * len(here)  # rounding may settle a near tie the other way


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_started_sampler_can_be_pickled(name):
    sampler = build(name)
    sampler.batch(0)
    copy = pickle.loads(pickle.dumps(sampler))
    for step in range(min(3, len(sampler))):
        assert np.array_equal(copy.batch(step), sampler.batch(step))
    sampler.load_state_dict(copy.state_dict())
    assert np.array_equal(pickle.loads(pickle.dumps(sampler)).batch(0), copy.batch(0))
