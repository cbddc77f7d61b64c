"""A part written as a call in a string: `"margin(beta=1.2)"` becomes an object.

The file name is the name: `create("losses", "multi_similarity")` is the class `MultiSimilarity` of
`unimetric/losses/multi_similarity.py`. A dotted name reaches code outside: `create("losses", "mypkg.MyLoss(alpha=2)")`.
The text is parsed with `ast` and holds literals only, so that a config file can run no code of its own.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from unimetric.arguments import checked, local_path, rejection, requirement
from unimetric.declarations import Declaration, declared_by, plain, read_declaration
from unimetric.errors import UnimetricError, closest

#: Folders of components. `unimetric.kinds.OF` has the interface of each.
KINDS = (
    "adapters",
    "audits",
    "backbones",
    "datasets",
    "formats",
    "heads",
    "losses",
    "metrics",
    "miners",
    "objectives",
    "optimizers",
    "samplers",
    "schedules",
    "splits",
    "stores",
    "transforms",
)

#: Arguments that a run provides to constructors that name them, with placeholders to check a spec string without a run. The list is closed.
OFFERED: dict[str, Any] = {
    "num_classes": 1,
    "dim": 1,
    "branches": (1,),
    "features": 1,
    "labels": (),
    "batch_size": 1,
    "seed": 0,
    "miner": "",
    "loss": "",
}

#: Arguments that are provided to one component type only: an index provides its folder to a store, a run its class names to a sampler.
_OFFERED_TO: dict[str, dict[str, Any]] = {"samplers": {"class_names": ()}, "stores": {"path": ""}}


#: Folders whose functions are called without inputs: all of their parameters are arguments of a spec string.
_WITHOUT_INPUTS = ("datasets", "formats", "samplers", "stores", "transforms")

#: Arguments that are spec strings, or lists of them, and the folder of their component type.
NESTED = {"auxiliary": "losses", "loss": "losses", "metric": "metrics", "miner": "miners", "objective": "objectives", "parts": "datasets"}


@dataclass(frozen=True)
class Call:
    """A parsed part: its name and the arguments that the user wrote."""

    name: str
    positional: tuple[Any, ...]
    named: dict[str, Any]


def parse(text: str) -> Call:
    """`"margin(beta=1.2)"` -> `Call("margin", (), {"beta": 1.2})`.

    >>> parse("samples_per_class(n=2)")
    Call(name='samples_per_class', positional=(), named={'n': 2})
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UnimetricError(f"cannot read `{_short(text)}`", _spelling(text)) from None
    positional: list[Any] = []
    named: dict[str, Any] = {}
    if isinstance(node, ast.Call):
        for argument in node.args:
            positional.append(_literal(argument, text))
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in named:
                raise UnimetricError(f"cannot read `{_short(text)}`", "name each argument once: `name(argument=value)`")
            named[keyword.arg] = _literal(keyword.value, text)
        node = node.func
    return Call(_dotted(node, text), tuple(positional), named)


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


def _literal(node: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        written = ast.get_source_segment(text.strip(), node) or "a value"
        raise UnimetricError(
            f"`{_short(written)}` in `{_short(text)}` is not a literal",
            "arguments are numbers, strings in quotes, True, False, None, or lists of these",
        ) from None


def _dotted(node: ast.expr, text: str) -> str:
    words = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise UnimetricError(f"cannot read `{_short(text)}`", _spelling(text))
    return ".".join([node.id, *reversed(words)])


#: Usual names of metrics, and the component of each.
_AT = {"r": "recall", "recall": "recall", "hit": "recall", "p": "precision", "precision": "precision", "map": "map_at_k"}


def _spelling(text: str) -> str:
    """Return a hint for a spec string that cannot be read."""
    if named := re.fullmatch(r"\s*(\w+)@(\d+|[rR])\s*", text):
        name, k = named[1].lower(), named[2].lower()
        if k == "r" and name in ("map", "p", "precision"):
            return f"write `{'map_at_r' if name == 'map' else 'r_precision'}`"
        if k != "r" and name in _AT:
            return f"write `{_AT[name]}(k={k})`"
    specs = [word.strip() for word in re.split(r",(?![^(\[]*[)\]])", text)]
    if len(specs) > 1 and all(re.fullmatch(r"\w+(\(.*\))?", spec) for spec in specs):
        return f"separate several with semicolons: `{'; '.join(specs)}`"
    return "write a name, or a call such as `margin(beta=1.2)`"


def names(kind: str) -> list[str]:
    """Every part of a kind: the files of its folder.

    >>> "margin" in names("losses")
    True
    """
    if kind not in KINDS:
        raise UnimetricError(f"unknown component type `{kind}`", closest(kind, KINDS))
    files = os.listdir(Path(__file__).parent / kind)
    return sorted(file.removesuffix(".py") for file in files if file.endswith(".py") and not file.startswith("_"))


def find(kind: str, name: str) -> Any:
    """Return the class or function of a name.

    It is in the file of that name, or anywhere if the name is dotted.
    """
    if "." in name:
        return _find_outside(kind, name)
    attribute = declaration(kind, name).name
    return getattr(importlib.import_module(f"unimetric.{kind}.{name}"), attribute)


def declaration(kind: str, name: str) -> Declaration:
    """Return the arguments, documentation and class attributes of a component.

    A component of Unimetric is read from its source, without importing it. A third-party one is imported.

    >>> declaration("losses", "margin").parameters["beta"].default
    1.2
    """
    if "." in name:
        part = _find_outside(kind, name)
        signature(part)
        declared = declared_by(part, has_inputs=kind not in _WITHOUT_INPUTS)
        if kind == "optimizers" and inspect.isclass(part):  # its first argument is what it trains
            return replace(declared, parameters=dict(list(declared.parameters.items())[1:]))
        return declared
    file = os.path.join(os.path.dirname(__file__), kind, f"{name}.py")
    if kind not in KINDS or name.startswith("_") or name != name.lower() or not os.path.isfile(file):
        raise UnimetricError(f"no `{_short(name)}` in {kind}", _other(kind, name) or closest(name[:200], names(kind)))
    return read_declaration(kind, name)


def _other(kind: str, text: str) -> str:
    """Return a hint if the text is a folder, a file or a network of timm instead of a name."""
    if len(text) > 200:
        return ""
    if kind == "datasets" and os.path.isdir(text):
        return f"write `folder(root={text!r})`"
    if kind == "datasets" and Path(text).suffix in (".pack", ".csv"):
        return f"write `pack(path={text!r})`" if text.endswith(".pack") else f"write `csv(file={text!r})`"
    if kind == "backbones" and re.fullmatch(r"[\w.]+", text):
        near = closest(text, names(kind))
        return (f"{near} " if near.startswith("did") else "") + f"a network of timm is written as `timm(name={text!r})`"
    return ""


#: Folders whose third-party components are modules of torch.
_MODULES = ("backbones", "heads", "losses", "miners", "objectives")

_trust: ContextVar[tuple[str, ...]] = ContextVar("trust", default=())


@contextmanager
def trusting(*packages: str) -> Iterator[None]:
    """Allow spec strings to name classes and functions of some packages.

    A config file names them, but only the caller can trust them: here, by `create(..., trust=...)`, by the command-line
    option `--trust`, or by the environment variable `UNIMETRIC_TRUST`, separated by commas.

    Args:
        packages: Names of top-level packages.
    """
    token = _trust.set((*_trust.get(), *packages))
    try:
        yield
    finally:
        _trust.reset(token)


def trusted() -> tuple[str, ...]:
    """Return the packages that the caller trusts, to pass them on to another process."""
    return (*_trust.get(), *os.environ.get("UNIMETRIC_TRUST", "").replace(",", " ").split())


def _find_outside(kind: str, name: str) -> Any:
    """Return a class or function of a trusted package. Nothing is imported from any other."""
    package = name.partition(".")[0]
    usual = package == "pytorch_metric_learning" and kind in ("losses", "miners")
    if not usual and not name.startswith(f"unimetric.{kind}.") and package not in trusted():
        exists = package in sys.modules or importlib.util.find_spec(package) is not None
        if not exists and _other(kind, name):  # such as the network `vit_small_patch14_dinov2.lvd142m`, or the file `cub.pack`
            raise UnimetricError(f"no `{name}` in {kind}", _other(kind, name))
        raise UnimetricError(
            f"`{_short(name)}` is outside Unimetric, and naming it runs code of the package `{_short(package)}`",
            f"add `--trust {package[:200]}` if you trust that package and the file that names it",
        )
    module_name, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, RecursionError) as error:
        raise UnimetricError(f"cannot import `{module_name[:100]}`: {error}", "install it, or put it on PYTHONPATH") from None
    part = getattr(module, attribute, None)
    if part is None:
        raise UnimetricError(f"`{module_name}` has no `{attribute}`", closest(attribute, vars(module)))
    if not (inspect.isclass(part) or inspect.isfunction(part)):
        raise UnimetricError(f"`{name}` is neither a class nor a function", f"name one of `{module_name}`")
    # A trusted package imports others: what it does not define itself, such as `os.system`, is not trusted.
    if part.__module__.partition(".")[0] != package:
        raise UnimetricError(f"`{name}` is defined in `{part.__module__}`, not in `{package}`", f"name a class or function of `{package}`")
    if kind in _MODULES and not _foreign().is_module(part):
        raise UnimetricError(
            f"`{name}` cannot be one of the {kind}: it is not a subclass of `torch.nn.Module`", f"name one of `{package}` that is"
        )
    return part


def signature(part: Any) -> inspect.Signature:
    """Return the parameters of a class or function."""
    try:
        return inspect.signature(part)
    except ValueError:  # some that are built into Python
        raise UnimetricError(
            f"`{getattr(part, '__name__', part)}` does not say its arguments", "name a class or a function of your own"
        ) from None


def offered_to(kind: str) -> dict[str, Any]:
    """Return the arguments that a component type is provided with, and placeholders.

    >>> sorted(set(offered_to("stores")) - set(offered_to("losses")))
    ['path']
    """
    return OFFERED | _OFFERED_TO.get(kind, {})


def bind(kind: str, text: str, **offered: Any) -> tuple[Any, dict[str, Any]]:
    """Find a part and check what was written against its signature, without building it.

    Returns the class or function, and its keyword arguments: what the user wrote, and of what the run offers only what is asked for.
    """
    arguments = bind_arguments(kind, text, **offered)
    return find(kind, parse(text).name), arguments


def bind_arguments(kind: str, text: str, **offered: Any) -> dict[str, Any]:
    """Return the keyword arguments of a component as `bind` does.

    No component of Unimetric is imported.

    Raises:
        UnimetricError: The spec string is wrong, or an argument is missing or out of range.
    """
    try:
        call = parse(text)
    except UnimetricError as error:
        raise UnimetricError(error.message, _other(kind, text) or error.hint) from None
    declared = declaration(kind, call.name)
    parameters = declared.configured
    # Components of Unimetric have no **kwargs. A third-party class may, and then checks its own arguments.
    takes_any = "." in call.name and any(each.kind is each.VAR_KEYWORD for each in declared.parameters.values())
    if len(call.positional) > len(parameters):
        raise UnimetricError(f"`{text}` has more values than `{call.name}` has arguments", "arguments: " + ", ".join(parameters))
    written = dict(zip(parameters, call.positional, strict=False))
    for key, value in call.named.items():
        if key not in parameters and not takes_any:
            hint = closest(key, parameters)
            if "." in call.name and key in declared.parameters:
                hint = f"make it keyword-only: `def {declared.name}(..., *, {key})`"
            raise UnimetricError(f"`{call.name}` has no argument `{key}` (in `{text}`)", hint)
        if key in written:
            raise UnimetricError(f"`{key}` is given twice in `{text}`", f"write `{key}=` once")
        written[key] = value
    if "." not in call.name:  # a third-party class may require a URL
        written = {key: local_path(value) if isinstance(value, str) else value for key, value in written.items()}
    for key, value in written.items():
        parameter = parameters.get(key)
        if parameter is not None and requirement(parameter.annotation, value):
            raise rejection(key, value, parameter.annotation, parameter.default, text)
        if key in NESTED and "." not in call.name:
            _check_nested(key, value, text)
    for key, value in offered.items():
        if key not in offered_to(kind):
            raise TypeError(f"a run does not offer `{key}`")
        if key in parameters and key not in written and value is not None:
            written[key] = value
    adopted = _foreign().offer(find(kind, call.name), offered) if "." in call.name else {}
    missing = [key for key, each in parameters.items() if key not in {*written, *adopted} and each.default is each.empty]
    if missing:
        raise UnimetricError(f"`{text}` needs `{missing[0]}`", f"write `{call.name}({missing[0]}=...)`")
    return adopted | written


def complete_arguments(kind: str, text: str, **offered: Any) -> dict[str, Any]:
    """Return the keyword arguments of a component as `bind` does, and the defaults of others."""
    parameters = declaration(kind, parse(text).name).configured
    defaults = {key: each.default for key, each in parameters.items() if each.default is not each.empty}
    return defaults | bind_arguments(kind, text, **offered)


def _check_nested(key: str, value: Any, text: str) -> None:
    """Check the spec strings in an argument.

    An example is `metric` in `per_source(metric='recall(k=1)')`.
    """
    for inner in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(inner, str) or not inner:
            continue
        try:
            bind_arguments(NESTED[key], inner, **OFFERED)
        except UnimetricError as error:
            raise UnimetricError(f"{error.message} (in `{text}`)", error.hint) from None
        if key == "metric" and declaration("metrics", parse(inner).name).returns.startswith("dict"):
            raise UnimetricError(f"`metric` must return one value, but `{inner}` returns several (in `{text}`)", "use `recall(k=1)`")


def text_of(name: str, arguments: dict[str, Any]) -> str:
    """A part as it is written.

    >>> text_of("margin", {"beta": 1.2}), text_of("margin", {})
    ('margin(beta=1.2)', 'margin')
    """
    words = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"{name}({words})" if words else name


def create(kind: str, text: str | Any, *, trust: Sequence[str] = (), **given: Any) -> Any:
    """Build a component from its spec string.

    Examples are `create("losses", "margin(beta=1.2)", num_classes=100)` and `create("adapters", "puma",
    backbone=net)`.

    Args:
        kind: Folder of the component, such as `losses` or `heads`.
        text: Spec string: a name or a call. A component that is already built takes no arguments and is returned, with the members
            of its kind that it lacks.
        trust: Names of packages whose classes and functions the spec string may name.
        given: Run-provided arguments (see `offered_to`), and inputs of a component that is a function, by name.

    Raises:
        UnimetricError: The spec string is wrong, an argument is out of range, or an input is missing.
    """
    if not isinstance(text, str):
        component = _foreign().completed(kind, text)
        ignored = [key for key, value in given.items() if value is not None]
        if ignored:
            name = getattr(text, "__name__", type(text).__name__)
            raise UnimetricError(
                f"`{name}` is already built, and `{ignored[0]}` would change nothing",
                f"pass `{ignored[0]}` where it is built, or use a spec string",
            )
        return component
    if trust:
        with trusting(*trust):
            return create(kind, text, **given)
    offered = {key: value for key, value in given.items() if key in offered_to(kind)}
    part, arguments = bind(kind, text, **offered)
    arguments |= _inputs(kind, text, {key: value for key, value in given.items() if key not in offered})
    if "." in parse(text).name:
        miner = create("miners", offered["miner"]) if kind == "losses" and offered.get("miner") else None
        return _foreign().build(kind, text, part, arguments, miner)
    try:
        return part(**arguments)
    except (ValueError, RuntimeError, ArithmeticError) as error:  # such as torch's about memory
        raise UnimetricError(f"cannot build `{text}`: {error}", "check its arguments") from error


def _inputs(kind: str, text: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a function, which are its parameters before the `*`."""
    declared = declaration(kind, parse(text).name)
    parameters = {key: each for key, each in declared.parameters.items() if declared.is_input(each)}
    for key in given:
        if key not in parameters:
            written = f'write it into the text: `create({kind!r}, "{parse(text).name}({key}={given[key]!r})")`'
            raise UnimetricError(
                f"`{text}` has no input `{key}`",
                written if key in declared.configured else closest(key, [*parameters, *offered_to(kind)]),
            )
    for key, parameter in parameters.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if key not in given and parameter.default is parameter.empty and not variadic:
            raise UnimetricError(f"`{text}` needs `{key}`", f"write `create({kind!r}, {text!r}, {key}=...)`")
    return given


def _foreign() -> Any:
    """Import `foreign` when it is needed: it loads torch."""
    from unimetric import foreign

    return foreign


def open_folder(kind: str) -> ModuleType:
    """Import a folder of components, but none of its files."""
    return importlib.import_module(f"unimetric.{kind}")


def import_name(module: str, name: str) -> Any:
    """Import a name of this package from its module."""
    return getattr(importlib.import_module(module), name)


# --- Folders of components as modules --------------------------------------------------------------


class _Catalogue(ModuleType):
    """Folder of components as a module: `losses.Margin`, `metrics.recall`.

    Files are imported on first use.
    """

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "__all__":
            return sorted({*components(self.__name__.rpartition(".")[2]).values(), *self.__dict__["_further"]})
        if attribute.startswith("__"):
            raise AttributeError(f"module `{self.__name__}` has no attribute `{attribute}`")
        further = self.__dict__["_further"]
        if attribute in further:
            value = import_name(further[attribute], attribute)
            super().__setattr__(attribute, value)
            return value
        kind = self.__name__.rpartition(".")[2]
        name = next((each for each in names(kind) if plain(each) == plain(attribute)), "")
        module = importlib.import_module(f"{self.__name__}.{name}") if name else None
        if attribute in self.__dict__:  # bound by the import: a function, or a file as a module
            return self.__dict__[attribute]
        value = vars(module).get(attribute) if module else None
        if getattr(value, "__module__", "") != f"{self.__name__}.{name}":
            raise AttributeError(f"module `{self.__name__}` has no attribute `{attribute}`: {closest(attribute, dir(self))}")
        super().__setattr__(attribute, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Bind a name.

        If a file is imported whose function has the same name, the function is bound, with checked arguments.
        """
        if isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}":
            function = vars(value).get(name)
            if inspect.isfunction(function) and function.__module__ == value.__name__:
                vars(value)[name] = checked(function)
                value = vars(value)[name]
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__all__, *super().__dir__()})


def catalogue(package: str, **further: str) -> None:
    """Give a folder of components their names as attributes, without importing its files.

    `from unimetric.losses import Margin` imports one file. Importing `metrics/recall.py` binds the
    function as `metrics.recall`, not the file.

    Args:
        package: `__name__` of the folder.
        further: Names that are not components, and the modules that define them.
    """
    module = sys.modules[package]
    module.__dict__["_further"] = further
    module.__class__ = _Catalogue


def components(kind: str) -> dict[str, str]:
    """Return the class or function of each file of a folder, read from the source.

    >>> components("losses")["multi_similarity"], components("metrics")["recall"]
    ('MultiSimilarity', 'recall')
    """
    return {name: read_declaration(kind, name).name for name in names(kind)}
