"""Allowed values of every argument of every component, and their errors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from torch import nn

from unimetric.arguments import Count, Form, Fraction, Natural, Positive, Range, Real, allowed_values, checked, requirement
from unimetric.config import load
from unimetric.errors import UnimetricError
from unimetric.geometry.space import Space
from unimetric.images.table import Table
from unimetric.kinds import Audited
from unimetric.spec import KINDS, OFFERED, bind, create, find, names, signature


def keywords(part: Any) -> dict[str, Any]:
    """Resolved annotations of the keyword-only arguments."""
    parameters = signature(part).parameters.items()
    return {key: allowed_values(part, key) for key, parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


ARGUMENTS = [(kind, name, key) for kind in KINDS for name in names(kind) for key in keywords(find(kind, name))]


def outside(allowed: Any) -> Iterator[Any]:
    """Values that an annotation does not allow."""
    origin, options = get_origin(allowed), get_args(allowed)
    if origin is Annotated:
        for limit in allowed.__metadata__:
            if isinstance(limit, Range):
                if get_origin(options[0]) in (list, tuple):
                    yield []
                else:
                    yield from (bound - 1 for bound in (limit.least,) if bound is not None)
                    yield from (bound + 1 for bound in (limit.most,) if bound is not None)
                    yield from (bound for bound in (limit.above, limit.below) if bound is not None)
        yield from outside(options[0])
    elif origin is Literal:
        yield from ("banana", -7)
    elif origin in (list, tuple):
        yield from ([value] for value in outside(options[0]))
        yield 3
    elif options:
        yield from (value for option in options for value in outside(option) if requirement(allowed, value))
    elif allowed in (int, float):
        yield from (math.inf, 2**63, "banana", True, None)
    elif allowed in (str, bool):
        yield from (7, [])


def on_bounds(allowed: Any) -> list[Any]:
    """Values on the bounds of a number, or on the edge of an open bound."""
    found = []
    for option in (allowed, *get_args(allowed)):
        for limit in getattr(option, "__metadata__", ()):
            if isinstance(limit, Range) and get_args(option)[0] in (int, float):
                found += [bound for bound in (limit.least, limit.most) if bound is not None]
                found += [bound + 1e-6 for bound in (limit.above,) if bound is not None]
                found += [bound - 1e-6 for bound in (limit.below,) if bound is not None]
    return found


def text_of_value(value: Any) -> str:
    return repr(value).replace("inf", "1e999")


@pytest.mark.parametrize(("kind", "name", "key"), ARGUMENTS)
def test_values_outside_their_range_are_rejected(kind: str, name: str, key: str) -> None:
    part = find(kind, name)
    allowed = keywords(part)[key]
    values = list(outside(allowed))
    assert values or key in ("labels", "class_names"), f"{kind}/{name}.py: declare what `{key}` may be"
    for value in values:
        text = f"{name}({key}={text_of_value(value)})"
        with pytest.raises(UnimetricError, match=f"^`{key}` must be ") as caught:
            bind(kind, text, **OFFERED)
        assert f"in `{text}`" in caught.value.message and caught.value.hint
        with pytest.raises(UnimetricError, match=f"^`{key}` must be "):
            part(**{key: value})


@pytest.mark.parametrize(("kind", "name", "key"), ARGUMENTS)
def test_numbers_have_a_range_and_defaults_are_in_it(kind: str, name: str, key: str) -> None:
    part = find(kind, name)
    allowed = keywords(part)[key]
    assert int not in (allowed, *get_args(allowed)) or get_origin(allowed) is Annotated, f"{kind}/{name}.py: `{key}` is a bare int"
    assert float not in (allowed, *get_args(allowed)) or get_origin(allowed) is Annotated, f"{kind}/{name}.py: `{key}` is a bare float"
    default = signature(part).parameters[key].default
    assert default is inspect.Parameter.empty or not requirement(allowed, default)


LABELS = np.repeat(np.arange(6), 4)
TABLE = Table(
    paths=tuple(f"{row}.png" for row in range(24)), labels=LABELS, class_names=tuple("abcdef"), train=LABELS < 3, source_names=("toy",)
)
RUN = {"num_classes": 4, "dim": 8, "branches": (8,), "features": 8, "labels": LABELS, "batch_size": 4}
IMAGE = np.zeros((8, 8, 3), np.uint8)
SPACE = Space(np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32), LABELS)
INPUTS: dict[str, Any] = {
    "audits": lambda: {"gallery": Audited(SPACE, TABLE.paths, LABELS.tolist(), {}, lambda id_: IMAGE)},
    "splits": lambda: {"table": TABLE},
    "metrics": lambda: {"space": Space(torch.randn(24, 4), torch.from_numpy(LABELS))},
    "schedules": lambda: {"progress": 1.5, "epochs": 10},
    "optimizers": lambda: {"groups": [{"params": [nn.Parameter(torch.zeros(2))]}]},
    "adapters": lambda: {"backbone": create("backbones", "timm(name='test_vit')")},
}
#: Backbones are slow to build, and datasets are read from a disk.
BUILT = [each for each in ARGUMENTS if each[0] not in ("backbones", "datasets")]


@pytest.mark.parametrize(("kind", "name", "key"), BUILT)
def test_values_on_a_bound_build_or_are_rejected(kind: str, name: str, key: str) -> None:
    for value in on_bounds(keywords(find(kind, name))[key]):
        given = RUN | INPUTS.get(kind, dict)()
        try:
            create(kind, f"{name}({key}={value!r})", **{each: given[each] for each in given if each != key})
        except UnimetricError:
            continue


def test_every_input_is_named() -> None:
    adapted = create("adapters", "puma(rank=2)", **INPUTS["adapters"]())
    assert adapted(torch.randn(2, 3, 160, 160)).shape[0] == 2
    with pytest.raises(UnimetricError, match="`puma` needs `backbone`"):
        create("adapters", "puma")
    with pytest.raises(UnimetricError, match=r"`recall\(k=2\)` needs `space`"):
        create("metrics", "recall(k=2)")
    with pytest.raises(UnimetricError, match="`puma` has no input `backbon`") as caught:
        create("adapters", "puma", backbon=None)
    assert "`backbone`" in caught.value.hint
    with pytest.raises(UnimetricError, match="`flat` has no input `dtype`") as caught:
        create("stores", "flat", path="x", dim=8, dtype="int8")
    assert caught.value.hint == "write it into the text: `create('stores', \"flat(dtype='int8')\")`"


@pytest.mark.parametrize(
    ("key", "value", "argument"),
    [
        ("optimizer", "adam(lr=-1)", "lr"),
        ("schedule", "step(every=0)", "every"),
        ("head", "linear(dim=0)", "dim"),
        ("loss", "nt_xent(temperature=0)", "temperature"),
        ("metrics", ["recall(k=0)"], "k"),
        ("adapter", "puma(rank=0)", "rank"),
        ("precision", "banana", "precision"),
        ("device", "banana", "device"),
        ("strategy", "ddp_spawn", "strategy"),
        ("strategy", "banana", "strategy"),
        ("residence", "banana", "residence"),
        ("epochs", 0, "epochs"),
        ("workers", 2**11, "workers"),
    ],
)
def test_settings_are_rejected_before_a_run(key: str, value: Any, argument: str) -> None:
    with pytest.raises(UnimetricError, match=f"^settings: .*`{argument}` must be .*, got "):
        load(**{key: value})


def test_error_states_requirement_value_and_default() -> None:
    with pytest.raises(UnimetricError) as caught:
        bind("adapters", "puma(rank=0)")
    assert caught.value.message == "`rank` must be at least 1, got 0 in `puma(rank=0)`"
    assert caught.value.hint == "the default is `rank=128`"
    with pytest.raises(UnimetricError, match="got 'sun'") as caught:
        bind("objectives", "crt(reduction='sun')", **OFFERED)
    assert caught.value.hint == "did you mean `sum`?"


@pytest.mark.parametrize(
    ("allowed", "value", "required"),
    [
        (Count, 1, ""),
        (Count, np.int64(3), ""),
        (Count, 1.0, "an integer"),
        (Natural | None, -1, "at least 0 or None"),
        (Real, math.nan, "finite and at most 64 bits long"),
        (Positive, 0, "above 0"),
        (Fraction, 1, ""),
        (Annotated[float, Range(0, below=1)], 1, "at least 0 and below 1"),
        (Annotated[str, Form("[qk]+", "letters")], "qv", "letters"),
        (Literal[0, 1], True, "one of `0`, `1`"),
        (tuple[Count, ...], (2, 0), "a list of integers, each at least 1"),
        (tuple[Real, Real], (1, 2, 3), "a list of 2 numbers"),
        (Annotated[tuple[Count, ...], Range(1)], (), "a list of length at least 1"),
        (str | nn.Module, nn.Identity(), ""),
        (str | nn.Module, 3, "a string or a Module"),
        (Any, math.inf, "finite and at most 64 bits long"),
    ],
)
def test_requirement(allowed: Any, value: Any, required: str) -> None:
    assert requirement(allowed, value) == required


def test_checked_function_names_the_argument() -> None:
    @checked
    def grow(table: Any, *, by: Count = 2) -> int:
        return table + by

    assert grow(1, by=3) == 4
    with pytest.raises(UnimetricError, match=r"`by` must be at least 1, got 0 in `grow\(by=0\)`"):
        grow(1, by=0)
