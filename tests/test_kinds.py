"""Interfaces of the component types: their defaults, and third-party components that lack members."""

import copy
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import unimetric
from unimetric import kinds
from unimetric.errors import UnimetricError
from unimetric.foreign import completed, declared, stages_of
from unimetric.geometry import Triplets
from unimetric.geometry.space import Space
from unimetric.metrics import measure
from unimetric.runs.model import Model
from unimetric.spec import KINDS, bind, create, find, names

CLASSES = {kind: each for kind, each in kinds.OF.items() if issubclass(each, kinds.Component)}
OFFERED = {"num_classes": 4, "dim": 8, "branches": (8,), "features": 8, "batch_size": 4, "seed": 0, "labels": np.arange(12) // 3}


def some_space(sources=1):
    torch.manual_seed(0)
    labels = torch.arange(60) // 6
    return Space(torch.randn(60, 8), labels, gallery=labels < 9, source=labels % sources)  # the last class is unknown to the gallery


# --- the list of types ------------------------------------------------------------------------------------------------


def test_every_folder_of_components_has_a_class_or_a_protocol():
    source = Path(unimetric.__file__).parent
    others = {"analysis", "cli", "configs", "deploy", "geometry", "images", "report", "runs", "studies", "training"}
    found = {folder.name for folder in source.iterdir() if (folder / "__init__.py").exists()} - others
    assert set(kinds.OF) == set(KINDS) == found


@pytest.mark.parametrize("kind", sorted(CLASSES))
def test_every_component_inherits_from_its_class_and_overrides_with_the_same_arguments(kind):
    for name in names(kind):
        part = find(kind, name)
        assert issubclass(part, CLASSES[kind]), name
        for ancestor in CLASSES[kind].__mro__:
            own = vars(ancestor).items() if ancestor.__module__ == kinds.__name__ else ()
            for key, default in own:
                if inspect.isfunction(default) and key in vars(part) and not key.startswith("__"):
                    assert list(inspect.signature(vars(part)[key]).parameters) == list(inspect.signature(default).parameters), (name, key)


@pytest.mark.parametrize("kind", sorted(kinds.OF))
def test_defaults_are_methods_or_plain_values(kind):
    for ancestor in kinds.OF[kind].__mro__:
        if ancestor.__module__ == kinds.__name__:
            assert ancestor.__doc__
            defaults = [value for key, value in vars(ancestor).items() if not key.startswith("__")]
            assert not [value for value in defaults if isinstance(value, nn.Module | torch.Tensor | list | dict | set)]


# --- defaults ---------------------------------------------------------------------------------------------------------


def test_defaults_of_a_loss():
    loss = kinds.Loss()
    assert (loss.family, loss.reads, loss.default_miner, loss.lr, dict(loss.group)) == ("pair", (), "", None, {})
    points = torch.randn(3, 2)
    assert loss.placed(points) == (points, {"geometry": "cosine"})
    assert kinds.Miner().gives is Triplets


def test_defaults_of_an_objective():
    objective = kinds.Objective()
    assert (objective.views, objective.reads, dict(objective.optimizers), objective.groups(0.1)) == (1, (), {}, [])
    for call in (lambda: objective.meet(None), objective.begin, objective.stepped):
        assert call() is None


def test_groups_merge_equal_options_and_leave_out_what_the_objective_steps():
    objective = kinds.Objective()
    objective.first, objective.second, objective.third, objective.other = (nn.Linear(2, 2, bias=False) for _ in range(4))
    objective.fixed = nn.Linear(2, 2).requires_grad_(False)
    objective.second.lr, objective.second.group = 0.5, {"weight_decay": 0.25}
    objective.third.lr = None
    objective.other.own_step = True
    first, second = objective.groups(0.1)
    assert {key: first[key] for key in ("name", "lr", "weight_decay")} == {"name": "first", "lr": 0.1, "weight_decay": 0.0}
    assert {key: second[key] for key in ("name", "lr", "weight_decay")} == {"name": "second", "lr": 0.5, "weight_decay": 0.25}
    assert [id(weight) for weight in first["params"]] == [id(objective.first.weight), id(objective.third.weight)]
    assert [id(weight) for weight in second["params"]] == [id(objective.second.weight)]


def test_a_sampler_plans_each_epoch_once():
    class Counting(kinds.Sampler):
        steps, planned = 3, 0

        def plan(self):
            self.planned += 1
            return np.arange(6).reshape(3, 2) + 10 * self.epoch

    sampler = Counting()
    assert [rows.tolist() for rows in sampler] == [[0, 1], [2, 3], [4, 5]]
    sampler.batch(0)[:] = -1  # the caller may change its copy
    sampler.epoch = 2
    assert sampler.batch(1).tolist() == [22, 23] and sampler.batch(2).tolist() == [24, 25]
    assert len(sampler) == 3 and sampler.planned == 2 and not sampler.needs_embeddings
    assert sampler.fill(torch.zeros(6, 2)) is None and sampler.refresh(np.arange(2), torch.zeros(2, 2)) is None
    assert sampler.state_dict() == {} and sampler.load_state_dict({}) is None
    with pytest.raises(NotImplementedError):
        kinds.Sampler().batch(0)


def test_an_embedded_sampler_delegates_to_its_bank():
    class Bank:
        steps = 4

        def __init__(self):
            self.calls = []

        def __getattr__(self, name):
            return lambda *arguments: self.calls.append((name, *arguments)) or name

    sampler = kinds.EmbeddedSampler()
    sampler.bank, sampler.epoch = Bank(), 5
    assert sampler.needs_embeddings and len(sampler) == 4
    assert (sampler.batch(2), sampler.state_dict()) == ("batch", "state_dict")
    sampler.fill("all"), sampler.refresh("rows", "some"), sampler.load_state_dict("state")
    assert sampler.bank.calls == [
        ("batch", 5, 2),
        ("state_dict",),
        ("fill", "all"),
        ("refresh", "rows", "some"),
        ("load_state_dict", "state"),
    ]


def test_a_store_must_define_reading_and_writing_but_not_finishing():
    store = kinds.Store()
    assert dict(store.report) == {} and store.finish() is None and store.close() is None
    calls = [
        lambda: store.columns,
        lambda: store.write([], np.zeros((0, 2)), {}),
        lambda: store.delete([]),
        lambda: store.search(np.zeros((1, 2)), 1),
        lambda: store.fetch([]),
        lambda: store.vectors([]),
        lambda: store.scan(),
        lambda: len(store),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError):
            call()


def test_defaults_of_a_backbone_and_a_head():
    backbone = kinds.Backbone()
    assert backbone.merged() is backbone
    assert (backbone.find_transformer(), backbone.find_stages(), backbone.pool_size) == (None, (), 0)
    assert backbone.preference(torch.zeros(2, 3, 4, 4)).shape == (2, 0)

    class Sum(kinds.Head):
        def forward(self, tokens):
            return tokens.sum(1)

    head, tokens = Sum(7), torch.randn(2, 5, 7)
    (only,) = head.branches(tokens)
    torch.testing.assert_close(head.join((only,)), tokens.sum(1))
    assert (head.dim, head.dims, head.test_time, head.prototype_sets, head.variants(only)) == (7, (7,), (), (), {})
    assert head.maps(tokens).shape == (2, 0, 4)
    assert Sum(7, (3, 4)).dims == (3, 4)


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_a_metric_declares_which_values_are_better():
    assert find("metrics", "recall").better == "higher" and find("metrics", "pi_ratio").better == "neither"

    @kinds.metric(better="lower")
    def error(space):
        return 0.0

    assert error.better == "lower" and error.depth(some_space()) == 0


@pytest.mark.parametrize("sources", [1, 2])
@pytest.mark.parametrize("name", [*names("metrics"), "recall(k=7)", "mrr(k=None)", "map_at_k(k=3)", "map_at_k(class_size=True)"])
def test_a_metric_reads_as_many_neighbors_as_it_declares(name, sources, monkeypatch):
    space, read, own = some_space(sources), [], Space.average

    def average(self, k, value):
        if self is space:
            read.append(k)
        return own(self, k, value)

    monkeypatch.setattr(Space, "average", average)
    metric, arguments = bind("metrics", name)
    metric(space, **arguments)
    assert metric.depth(space, **arguments) == max(read, default=0)


def _spaces():
    points, labels, query = torch.randn(24, 6), torch.arange(24) // 4, torch.arange(24) % 2 == 0
    return {
        "closed": Space(points, labels),
        "singles": Space(points, torch.arange(24)),
        "unknown": Space(points, labels + 100 * query, query=query, gallery=~query),
        "open": Space(points, torch.where(labels < 2, labels + 100 * query, labels), query=query, gallery=~query),
        "groups": Space(points, labels, group=labels),
        "sources": Space(points, labels, source=labels % 2),
        "a source without matches": Space(points, torch.where(labels < 3, torch.arange(24), labels), source=labels < 3),
    }


@pytest.mark.parametrize("roles", _spaces())
@pytest.mark.parametrize("name", [*names("metrics"), "cmc(unmatched='miss')", "fnir(threshold=0.5)", "harmonic(metric='baus')"])
def test_a_metric_rejects_labels_before_it_reads_embeddings(name, roles):
    metric, arguments = bind("metrics", name)
    space = _spaces()[roles]
    try:
        metric(space, **arguments)
    except UnimetricError:
        with pytest.raises(UnimetricError):
            metric.check(space, **arguments)
    else:
        metric.check(space, **arguments)


def test_measure_searches_once_for_all_metrics(monkeypatch):
    searched, own = [], Space._search

    def search(self, k):
        searched.append(k)
        return own(self, k)

    monkeypatch.setattr(Space, "_search", search)
    measure(some_space(), ["recall(k=1)", "harmonic(metric='recall(k=9)')", "recall(k=4)"])
    assert searched == [9]


# --- third-party components -----------------------------------------------------------------------------------------------


class Pooling(nn.Module):
    """A head of someone who has never heard of this library."""

    def __init__(self):
        super().__init__()
        self.dim = 6
        self.layer = nn.Linear(8, 6)

    def forward(self, tokens):
        return self.layer(tokens.mean(1))


class Network(nn.Module):
    channels, mean, std = 8, (0.5,) * 3, (0.5,) * 3

    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(*[nn.Conv2d(3 if number == 0 else 8, 8, 1) for number in range(4)])

    def forward(self, images):
        return self.stages(images).flatten(2).mT


def test_components_of_this_package_are_returned_unchanged(tmp_path):
    for kind in CLASSES:
        name = {"backbones": "small", "samplers": "shuffle", "heads": "linear", "objectives": "plain"}.get(kind, names(kind)[0])
        component = create(kind, name, **OFFERED, **({"path": str(tmp_path)} if kind == "stores" else {}))
        before = dict(vars(component))
        assert completed(kind, component) is component and vars(component).keys() == before.keys()


def test_a_head_without_a_base_class_is_completed():
    head = Pooling()
    keys, tokens = list(head.state_dict()), torch.randn(2, 5, 8)
    assert completed("heads", head) is head and completed("heads", head) is head  # again changes nothing
    assert list(head.state_dict()) == keys
    assert (head.dims, head.test_time, head.prototype_sets, head.variants(None)) == ((6,), (), (), {})
    torch.testing.assert_close(head.join(head.branches(tokens)), head(tokens))
    other = copy.deepcopy(head)  # a copy's methods are its own
    nn.init.zeros_(other.layer.weight)
    nn.init.zeros_(other.layer.bias)
    assert other.branches(tokens)[0].abs().sum() == 0 < head.branches(tokens)[0].abs().sum()


def test_what_a_component_defines_is_kept():
    class Two(Pooling):
        dims, test_time = (2, 4), ("weights",)

        def branches(self, tokens):
            return self(tokens).split((2, 4), -1)

        def join(self, branches):
            return torch.cat(branches[::-1], -1)

    head, tokens = completed("heads", Two()), torch.randn(2, 5, 8)
    assert (head.dims, head.test_time) == ((2, 4), ("weights",))
    torch.testing.assert_close(head.join(head.branches(tokens)), head(tokens).roll(4, -1))
    assert declared("heads", Two, "test_time") == ("weights",) and declared("heads", Pooling, "test_time") == ()


def test_a_model_of_modules_without_base_classes():
    model = Model(Network(), Pooling())
    images = torch.randn(2, 3, 4, 4)
    embeddings, tokens, branches = model(images)
    assert model.dims == (6,) and len(branches) == 1 and branches[0] is embeddings and tokens.shape == (2, 16, 8)
    # Its submodule `stages` is no obstacle, and mixup finds the blocks at quarters of the depth.
    assert [id(stage) for stage in model.backbone.find_stages()] == [id(stage) for stage in list(model.backbone.stages)[1:]]
    assert model.backbone.find_transformer() is None and model.backbone.merged() is model.backbone


def test_an_objective_without_a_base_class_is_completed():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output, labels):
            return {"loss": self.scale * output.embeddings.square().mean()}

    objective = create("objectives", Mine())
    assert (objective.views, objective.reads, objective.optimizers) == (1, (), {})
    assert objective.begin() is None and objective.groups(0.3)[0]["lr"] == 0.3
    copy.deepcopy(objective)


def test_a_sampler_without_a_base_class_is_completed():
    class Mine:
        def batch(self, step):
            return np.arange(4)

        def __len__(self):
            return 1

    sampler = completed("samplers", Mine())
    assert not sampler.needs_embeddings and sampler.epoch == 0 and sampler.state_dict() == {}
    assert sampler.batch(0).tolist() == [0, 1, 2, 3]


def test_a_metric_that_declares_nothing_is_completed():
    def mine(space):
        return 1.0

    assert declared("metrics", mine, "better") == "higher"
    assert completed("metrics", mine) is mine and mine.better == "higher" and mine.depth(some_space()) == 0


def test_what_cannot_be_completed_is_an_error():
    class Branches(Pooling):
        def __init__(self):
            super().__init__()
            self.branches = nn.ModuleList()

    with pytest.raises(UnimetricError, match="`Branches` cannot be one of the heads: its `branches` is not a method"):
        completed("heads", Branches())
    with pytest.raises(UnimetricError, match="`Linear` cannot be one of the heads: it has no attribute `dim`"):
        completed("heads", nn.Linear(2, 2))
    with pytest.raises(UnimetricError, match="it has no attribute `channels`"):
        Model(nn.Identity(), Pooling())


def test_stages_of_a_network():
    resnet = nn.Module()
    for number in (1, 2, 3, 4):
        resnet.add_module(f"layer{number}", nn.Identity())
    assert [id(stage) for stage in stages_of(resnet)] == [id(resnet.layer1), id(resnet.layer2), id(resnet.layer3)]
    assert list(stages_of(nn.Identity())) == []
