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
import math
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from unimetric.errors import UnimetricError, closest

#: What a run offers to a constructor that asks for it by name, with stand-ins for reading a text without a run. The list is closed.
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
        raise UnimetricError(f"cannot read `{text}`", "write a name, or a call such as `margin(beta=1.2)`") from None
    positional: list[Any] = []
    named: dict[str, Any] = {}
    if isinstance(node, ast.Call):
        for argument in node.args:
            positional.append(_literal(argument, text))
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in named:
                raise UnimetricError(f"cannot read `{text}`", "name each argument once: `name(argument=value)`")
            named[keyword.arg] = _literal(keyword.value, text)
        node = node.func
    return Call(_dotted(node, text), tuple(positional), named)


def _literal(node: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise UnimetricError(
            f"`{ast.unparse(node)}` in `{text}` is not a literal",
            "arguments are numbers, strings in quotes, True, False, None, or lists of these",
        ) from None


def _dotted(node: ast.expr, text: str) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, text)}.{node.attr}"
    raise UnimetricError(f"cannot read `{text}`", "write a name, or a call such as `margin(beta=1.2)`")


def names(kind: str) -> list[str]:
    """Every part of a kind: the files of its folder.

    >>> "margin" in names("losses")
    True
    """
    package = importlib.import_module(f"unimetric.{kind}")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_"))


def find(kind: str, name: str) -> Any:
    """The class or function behind a name: in the file of that name, or anywhere if the name is dotted."""
    if "." in name:
        module_name, _, attribute = name.rpartition(".")
        try:
            part = getattr(importlib.import_module(module_name), attribute)
        except ImportError as error:
            raise UnimetricError(f"cannot import `{module_name}`: {error}", "install it, or put it on PYTHONPATH") from None
        except AttributeError:
            known = vars(importlib.import_module(module_name))
            raise UnimetricError(f"`{module_name}` has no `{attribute}`", closest(attribute, known)) from None
        if not callable(part):
            raise UnimetricError(f"`{name}` is neither a class nor a function", f"name one of `{module_name}`")
        return part
    if name not in names(kind):
        raise UnimetricError(f"no `{name}` in {kind}", closest(name, names(kind)))
    module = importlib.import_module(f"unimetric.{kind}.{name}")
    wanted = name.replace("_", "")
    for key, value in vars(module).items():
        if key.lower().replace("_", "") == wanted and getattr(value, "__module__", None) == module.__name__:
            return value
    raise TypeError(f"{module.__name__} defines nothing called `{name}`")  # a mistake of ours, not of the user


def signature(part: Any) -> inspect.Signature:
    """What a part takes when it is built; a function is built by giving its keyword-only arguments."""
    try:
        return inspect.signature(part)
    except ValueError:  # some that are built into Python
        raise UnimetricError(
            f"`{getattr(part, '__name__', part)}` does not say its arguments", "name a class or a function of your own"
        ) from None


def bind(kind: str, text: str, **offered: Any) -> tuple[Any, dict[str, Any]]:
    """Find a part and check what was written against its signature, without building it.

    Returns the class or function, and its keyword arguments: what the user wrote, and of what the run offers only what is asked for.
    """
    call = parse(text)
    part = find(kind, call.name)
    parameters = signature(part).parameters
    # What is handed over when the part is used, rather than configured, stands before the `*` of a function.
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    open_to_text = [key for key, parameter in parameters.items() if not _is_input(part, parameter) and parameter.kind not in variadic]
    # Ours have no **kwargs; a class from outside may, and then judges its own arguments.
    takes_any = "." in call.name and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if len(call.positional) > len(open_to_text):
        raise UnimetricError(f"`{text}` has more values than `{call.name}` has arguments", "arguments: " + ", ".join(open_to_text))
    written = dict(zip(open_to_text, call.positional, strict=False))
    for key, value in call.named.items():
        if key not in open_to_text and not takes_any:
            raise UnimetricError(f"`{call.name}` has no argument `{key}` (in `{text}`)", closest(key, open_to_text))
        if key in written:
            raise UnimetricError(f"`{key}` is given twice in `{text}`", f"write `{key}=` once")
        written[key] = value
    for key, value in written.items():
        if _out_of_range(value, key):
            raise UnimetricError(
                f"`{key}` in `{text}` is out of range", "write a finite number of at most 64 bits; a seed from 0 to 2**32 - 1"
            )
        if key in parameters:
            _check_type(text, key, value, parameters[key])
    for key, value in offered.items():
        if key not in OFFERED:
            raise TypeError(f"a run does not offer `{key}`")
        if key in open_to_text and key not in written and value is not None:
            written[key] = value
    if "." in call.name:
        written = _foreign().offer(part, offered) | written
    missing = [key for key in open_to_text if key not in written and parameters[key].default is inspect.Parameter.empty]
    if missing:
        raise UnimetricError(f"`{text}` needs `{missing[0]}`", f"write `{call.name}({missing[0]}=...)`")
    return part, written


def text_of(name: str, arguments: dict[str, Any]) -> str:
    """A part as it is written.

    >>> text_of("margin", {"beta": 1.2}), text_of("margin", {})
    ('margin(beta=1.2)', 'margin')
    """
    words = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"{name}({words})" if words else name


def _is_input(part: Any, parameter: inspect.Parameter) -> bool:
    return inspect.isfunction(part) and parameter.kind is not parameter.KEYWORD_ONLY


def _out_of_range(value: Any, key: str = "") -> bool:
    """Whether a number, alone or in a list, is one that torch and numpy cannot count with, or that no generator takes for a seed."""
    if isinstance(value, list | tuple):
        return any(map(_out_of_range, value))
    if isinstance(value, int):
        return not (0 <= value < 2**32 if key == "seed" else -(2**63) <= value < 2**63)
    return isinstance(value, float) and not math.isfinite(value)


_LITERALS = {"int": int, "float": (int, float), "str": str, "bool": bool}


def _check_type(text: str, key: str, value: Any, parameter: inspect.Parameter) -> None:
    """Catch `margin(beta="1.2")` here, rather than as a puzzle inside torch. Only plain annotations are judged."""
    allowed = str(parameter.annotation).replace(" ", "").split("|")
    allowed = [word for word in allowed if word != "nn.Module"]  # a part already built, which no text can be
    # Lists of names are left to the part, which knows what can be in them.
    if not all(word == "None" or word in _LITERALS or set(_items(word)) <= {"int", "float"} for word in allowed):
        return
    if not any(_fits(word, value) for word in allowed):
        given = parameter.default is not inspect.Parameter.empty
        hint = f"the default is {parameter.default!r}" if given else f"write it as {' or '.join(allowed)}"
        raise UnimetricError(f"`{key}` in `{text}` must be {' or '.join(allowed)}, not {value!r}", hint)


def _items(word: str) -> list[str]:
    """What a list or a tuple holds; a plain word holds itself.

    >>> _items("tuple[float,float]"), _items("tuple[int,...]"), _items("str")
    (['float', 'float'], ['int'], ['str'])
    """
    kind, bracket, inside = word.partition("[")
    return inside.removesuffix("]").removesuffix(",...").split(",") if bracket and kind in ("list", "tuple") else [word]


def _fits(word: str, value: Any) -> bool:
    if word == "None":
        return value is None
    if word in _LITERALS:
        return isinstance(value, cast(type, _LITERALS[word])) and (word == "bool" or not isinstance(value, bool))
    items = _items(word)
    if not isinstance(value, list | tuple) or len(items) not in (1, len(value)):
        return False
    return all(_fits(item, each) for item, each in zip(items * (len(value) if len(items) == 1 else 1), value, strict=True))


def create(kind: str, text: str | Any, **offered: Any) -> Any:
    """Build any part: `create("losses", "margin(beta=1.2)", num_classes=100, dim=128)`.

    Args:
        kind: the folder, such as `losses` or `heads`.
        text: a name or a call; anything that is not a string is taken as a part already built.
        offered: values that a run has (see `OFFERED`), given to a constructor that asks for them.
    """
    if not isinstance(text, str):
        return text
    part, arguments = bind(kind, text, **offered)
    if "." in parse(text).name:
        miner = create("miners", offered["miner"]) if kind == "losses" and offered.get("miner") else None
        return _foreign().build(kind, text, part, arguments, miner)
    try:
        return part(**arguments)
    except (ValueError, RuntimeError, ArithmeticError) as error:  # such as torch's about a size below zero
        raise UnimetricError(f"cannot build `{text}`: {error}", "check its arguments") from error


def _foreign() -> Any:
    """Import `foreign` when it is needed: it loads torch."""
    from unimetric import foreign

    return foreign


def kinds() -> list[str]:
    """Every kind of part: the folders that hold parts by name."""
    here = Path(__file__).parent
    return sorted(folder.name for folder in here.iterdir() if (folder / "__init__.py").exists() and folder.name not in _NOT_PARTS)


_NOT_PARTS = {"analysis", "cli", "deploy", "geometry", "images", "report", "runs", "studies", "training"}
