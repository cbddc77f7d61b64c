"""Check from declarations alone that the components of a run fit together.

No component is imported or built.

Conditions that involve several arguments are in the constructors, as `if condition: raise UnimetricError(...)`. Those that depend on
the arguments only are read from the source and evaluated here. The other conditions, such as whether timm has a network or an
adapter finds its layers, are checked when a run is built: by `train`, `bench` and `check --build`, before an image is read.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from unimetric.config import RunConfig
from unimetric.declarations import Declaration, defined
from unimetric.errors import UnimetricError, locating
from unimetric.spec import OFFERED, complete_arguments, declaration, parse

#: Problem and hint of a geometry that the loss does not have.
NO_CURVATURE = '`geometry = "poincare"` requires a loss with a curvature', 'use `loss = "hyperbolic"`, or `geometry = "cosine"`'


def check_declared_fit(config: RunConfig, place: str) -> None:
    """Check the components of a run against each other, without torch.

    Args:
        config: Settings of the run, whose spec strings are already checked one by one.
        place: Name of the settings in errors.

    Raises:
        UnimetricError: The components do not fit together.
    """
    with locating(place):
        _check(config)


def _check(config: RunConfig) -> None:
    known: dict[str, Any] = {"batch_size": config.batch_size, "seed": config.seed}
    head = _values("heads", config.head, known)
    known |= _branches(declaration("heads", parse(config.head).name), head)
    run: dict[str, Any] = known | {"loss": config.loss, "miner": config.miner or None}
    objectives, loss, miner = [config.objective], config.loss, config.miner
    for text in objectives:  # an objective may be around another one, which is appended
        objective = _values("objectives", text, run | {"loss": loss, "miner": miner or None})
        loss, miner = objective.get("loss") or loss, objective.get("miner") or miner
        objectives += [objective["objective"]] if objective.get("objective") else []
    _check_miner(loss, miner, config.miner)
    name = parse(loss).name
    if config.geometry == "poincare" and "." not in name and "curvature" not in declaration("losses", name).parameters:
        raise UnimetricError(*NO_CURVATURE)
    texts = [
        ("backbones", config.backbone),
        ("adapters", config.adapter),
        ("heads", config.head),
        ("losses", loss),
        *(("objectives", text) for text in objectives),
        ("samplers", config.sampler),
        ("transforms", config.transform),
    ]
    for kind, text in texts:
        if text and "." not in parse(text).name:
            _check_conditions(kind, text, repr({key: run[key] for key in _PROVIDED.get(kind, ("seed",)) if key in run}))


@functools.lru_cache(maxsize=2048)
def _check_conditions(kind: str, text: str, run: str) -> None:
    """Raise the error of a component's constructor, if its arguments have one.

    Runs of a grid share most components, so those that passed are stored.

    Args:
        kind: Folder of the component.
        text: Its spec string.
        run: Arguments that the run provides, as a literal.
    """
    _raise_first(declaration(kind, parse(text).name), _values(kind, text, ast.literal_eval(run)))


#: Arguments that a run provides to some component types. It provides all of `OFFERED` to objectives and losses, and the seed to others.
_PROVIDED = {
    "heads": ("features", "seed"),
    "objectives": tuple(OFFERED),
    "losses": tuple(OFFERED),
    "samplers": ("labels", "batch_size", "seed"),
}


def _values(kind: str, text: str, known: dict[str, Any]) -> dict[str, Any]:
    """Return the known arguments of a component, with defaults.

    Arguments that only the built run provides are excluded.
    """
    call = parse(text)
    parameters = declaration(kind, call.name).configured
    provided = {key: known.get(key, OFFERED[key]) for key in _PROVIDED.get(kind, ("seed",))}
    written = {*list(parameters)[: len(call.positional)], *call.named}
    unknown = provided.keys() - known.keys() - written
    return {key: value for key, value in complete_arguments(kind, text, **provided).items() if key not in unknown}


def _check_miner(loss: str, miner: str, setting: str) -> None:
    """Raise an error if a loss takes no miner, or reads other tuples than its miner gives."""
    check_takes_miner(loss, setting)
    name = parse(loss).name
    if "." in name or "miner" not in declaration("losses", name).parameters:
        return
    declared = declaration("losses", name)
    members, arguments = declared.members, complete_arguments("losses", loss, **OFFERED)
    wanted = arguments["miner"] or miner or members["default_miner"]
    if "." not in parse(wanted).name:
        mined = declaration("miners", parse(wanted).name)
        only = members["needs_triplets"] if arguments.get(members["needs_triplets"]) else ""
        check_mined(declared.name, members["reads"], mined.name, mined.members["gives"], default=members["default_miner"], only=only)


def check_takes_miner(loss: str, setting: str) -> None:
    """Raise an error if the setting `miner` is not empty, and the loss takes none."""
    name = parse(loss).name
    if setting and "." not in name and "miner" not in declaration("losses", name).parameters:
        raise UnimetricError(f"`miner = {setting!r}`, but the loss `{name}` takes none", "leave it empty: `miner=` after the loss")


def check_mined(loss: str, reads: Sequence[str], miner: str, gives: str, *, default: str, only: str) -> None:
    """Raise an error if a loss does not read the tuples of a miner.

    Args:
        loss: Name of the loss.
        reads: Names of the tuples that it reads.
        miner: Name of the miner.
        gives: Name of the tuples that it gives.
        default: Name of the loss's default miner.
        only: Name of an argument of the loss with which it reads triplets only, if it is set.
    """
    if gives not in reads or (only and gives != "Triplets"):
        name, read = (f"{loss}({only}=True)", "Triplets") if only else (loss, " or ".join(reads))
        raise UnimetricError(
            f"the loss {name} reads {read}, but the miner {miner} gives {gives}",
            f"leave `miner` out to use {loss}'s own, `{default}`" + (f", or leave `{only}` out" if only else ""),
        )


# --- Conditions of constructors ---------------------------------------------------------------------


class _Unknown(Exception):
    """An expression depends on more than the arguments."""


_BUILTINS = {each.__name__: each for each in (len, max, min, next, range, round, set, sum)}


def _evaluate(node: ast.expr, values: dict[str, Any]) -> Any:
    try:
        return eval(compile(ast.Expression(node), "<constructor>", "eval"), {"__builtins__": _BUILTINS}, dict(values))
    except Exception:
        raise _Unknown from None


def _branches(head: Declaration, values: dict[str, Any]) -> dict[str, Any]:
    """Return the dimension of a head and of its branches, or nothing if they are not known.

    The head passes them to `Head.__init__`.
    """
    for node in (each for statement in head.body for each in ast.walk(statement)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
            try:
                dim, *dims = [_evaluate(each, values) for each in node.args]
            except (_Unknown, ValueError):
                return {}
            return {"dim": dim, "branches": dims[0] if dims else (dim,)}
    return {}


def _raise_first(declared: Declaration, values: dict[str, Any], depth: int = 2) -> None:
    """Raise the first error of a constructor whose condition is known to hold.

    Functions that the constructor calls are included.
    """
    values = dict(values)
    for statement in declared.body:
        for function, arguments in _calls(declared.module, statement, values) if depth else ():
            _raise_first(function, arguments, depth - 1)
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            try:
                values[statement.targets[0].id] = _evaluate(statement.value, values)
            except _Unknown:
                values.pop(statement.targets[0].id, None)
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Raise):
            _raise_if(statement, values)
        elif isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try | ast.Return):
            return  # what follows may depend on it


def _raise_if(statement: ast.If, values: dict[str, Any]) -> None:
    try:
        if not _evaluate(statement.test, values):
            return
    except _Unknown:
        return
    body = ast.Module(statement.body, type_ignores=[])
    exec(compile(body, "<constructor>", "exec"), {"__builtins__": _BUILTINS, "UnimetricError": UnimetricError, **values})


def _calls(module: str, statement: ast.stmt, values: dict[str, Any]) -> Iterator[tuple[Declaration, dict[str, Any]]]:
    """Yield the functions and classes of this package that a statement calls.

    Each comes with those of its arguments that are known.
    """
    if isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try):
        return
    for node in ast.walk(statement):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        function = defined(module, node.func.id)
        if function is None:
            continue
        given = [*zip(function.parameters, node.args, strict=False), *((each.arg, each.value) for each in node.keywords)]
        arguments = {}
        for key, value in given:
            try:
                arguments[str(key)] = _evaluate(value, values)
            except _Unknown:
                continue
        yield function, arguments
