"""Allowed values of arguments: declared in signatures, checked in one place.

    def puma(backbone, *, rank: Count = 128, keep: Annotated[float, Range(above=0, most=1)] = 0.5, pool: Literal["keys", "tokens"] = "keys")

Annotations consist of `int`, `float`, `str`, `bool`, `None`, `Literal`, lists and tuples of these, and the types below. An argument
of any other type, such as a tensor or a miner that is already built, accepts every value that is not a literal.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from numbers import Real as Number
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from unimetric.errors import UnimetricError, closest

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Range:
    """Bounds of a number, or of the number of items in a list.

    Without bounds, any finite number is allowed.

    Args:
        least: Smallest allowed value.
        most: Largest allowed value.
        above: Largest value that is too small.
        below: Smallest value that is too large.

    >>> str(Range(1)), str(Range(0, 1)), str(Range(above=0, most=1))
    ('at least 1', 'from 0 to 1', 'above 0 and at most 1')
    """

    least: float | None = None
    most: float | None = None
    above: float | None = field(default=None, kw_only=True)
    below: float | None = field(default=None, kw_only=True)

    def allows(self, value: Any) -> bool:
        """Return whether a number, or the length of a list, is within the bounds."""
        number = len(value) if isinstance(value, list | tuple) else value
        return (
            (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            return f"from {self.least} to {self.most}"
        words = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)


@dataclass(frozen=True)
class Form:
    """Form of a string.

    Args:
        pattern: Regular expression that matches the whole string.
        words: Description for errors, which follows "must be".
    """

    pattern: str
    words: str

    def allows(self, value: str) -> bool:
        """Return whether the pattern matches the whole string."""
        return re.fullmatch(self.pattern, value) is not None

    def __str__(self) -> str:
        return self.words


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Real = Annotated[float, Range()]
NonNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(above=0)]
Fraction = Annotated[float, Range(0, 1)]

_WORDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false", NoneType: "None"}
_PLURALS = {int: "integers", float: "numbers", str: "strings", bool: "truth values"}
_LITERALS = (int, float, str, bytes, list, tuple, dict, set, NoneType)


def requirement(allowed: Any, value: Any) -> str:
    """Return what an argument must be if the value is not allowed, and nothing if it is.

    Args:
        allowed: Resolved annotation of the argument.
        value: Value that was passed.

    >>> requirement(Count | None, 0), requirement(Count | None, "a"), requirement(Count | None, 3)
    ('at least 1 or None', 'an integer or None', '')
    """
    origin, options = get_origin(allowed), get_args(allowed)
    if origin is Annotated:
        wording = "a list of length {}" if isinstance(value, list | tuple) else "{}"
        failed = (wording.format(limit) for limit in allowed.__metadata__ if not limit.allows(value))
        return requirement(options[0], value) or next(failed, "")
    if origin in (Union, UnionType):
        failed_all = [requirement(option, value) for option in options]
        return "" if "" in failed_all else " or ".join(failed_all)
    if origin is Literal:
        known = any(value == option and type(value) is type(option) for option in options)
        return "" if known else "one of " + ", ".join(f"`{option}`" if option != "" else '""' for option in options)
    if origin in (list, tuple):
        return _items_requirement(options, value)
    return _plain_requirement(allowed, value)


def describe_values(allowed: Any) -> str:
    """Return the allowed values of an argument in words.

    >>> describe_values(Count), describe_values(Fraction | None), describe_values(Literal["mean", "max"])
    ('integer, at least 1', 'number, from 0 to 1; or None', '`mean` or `max`')
    """
    origin, options = get_origin(allowed), get_args(allowed)
    if origin is Annotated:
        is_text = any(isinstance(limit, Form) for limit in allowed.__metadata__)
        limits = [str(limit) for limit in allowed.__metadata__ if str(limit)]
        bounds = ["length " + limit for limit in limits] if get_origin(options[0]) in (list, tuple) else limits
        return ", ".join(bounds if is_text else [describe_values(options[0]), *bounds])
    if origin in (Union, UnionType):
        words = [describe_values(option) for option in options]
        return ("; or " if "," in "".join(words[:-1]) else " or ").join(words)
    if origin is Literal:
        choices = [f"`{option}`" if option != "" else "empty" for option in options]
        return " or ".join([", ".join(choices[:-1]), choices[-1]] if choices[1:] else choices)
    if origin in (list, tuple):
        item = describe_values(options[0])
        return f"list of {len(options)} values, each {item}" if options[1:] and options[-1] is not Ellipsis else f"list, each item {item}"
    if allowed is Any:
        return "any"
    return _WORDS.get(allowed, getattr(allowed, "__name__", str(allowed))).removeprefix("an ").removeprefix("a ")


def _items_requirement(options: tuple[Any, ...], value: Any) -> str:
    """Return what a list or tuple must be, if it is not."""
    item = get_args(options[0])[0] if get_origin(options[0]) is Annotated else options[0]
    many = len(options) == 1 or options[-1] is Ellipsis
    words = f"a list of {_PLURALS.get(item, 'values')}" if many else f"a list of {len(options)} {_PLURALS.get(item, 'values')}"
    if not isinstance(value, list | tuple) or not (many or len(value) == len(options)):
        return words
    for allowed, each in zip(options[:1] * len(value) if many else options, value, strict=True):
        problem = requirement(allowed, each)
        if problem:
            return words if problem == _WORDS.get(item) else f"{words}, each {problem}"
    return ""


def _plain_requirement(allowed: Any, value: Any) -> str:
    """Return what a single value must be, if it is not."""
    if allowed is int or allowed is float:
        if not isinstance(value, Integral if allowed is int else Number) or isinstance(value, bool):
            return _WORDS[allowed]
        return "" if is_countable(value) else "finite and at most 64 bits long"
    if allowed in _WORDS:
        return "" if isinstance(value, cast(type, allowed)) else _WORDS[allowed]
    if type(allowed) is not type:  # `Any`, or an array with a shape
        return "" if is_countable(value) else "finite and at most 64 bits long"
    return f"a {allowed.__name__}" if isinstance(value, _LITERALS) else ""


def is_countable(value: Any) -> bool:
    """Return whether torch and numpy can represent a number, or all numbers in a list.

    Values that are not numbers count as representable.
    """
    if isinstance(value, list | tuple):
        return all(map(is_countable, value))
    if isinstance(value, Integral):
        return -(2**63) <= int(value) < 2**63
    return not isinstance(value, float) or math.isfinite(value)


@functools.cache
def allowed_values(part: Any, key: str) -> Any:
    """Return the resolved annotation of one argument of a class or function.

    Only this annotation is evaluated, because the shapes of tensors in the others are not Python expressions.
    """
    function = inspect.unwrap(part.__init__ if inspect.isclass(part) else part)
    parameter = inspect.signature(function).parameters.get(key)
    if parameter is None or parameter.annotation is parameter.empty:
        return Any
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    try:
        return eval(parameter.annotation, getattr(function, "__globals__", {}))
    except Exception:  # a third-party annotation that exists only for type checkers
        return Any


def check(part: Any, arguments: Mapping[str, Any], text: str = "", name: str = "") -> None:
    """Raise an error that names the first argument whose value is not allowed.

    Args:
        part: Class or function.
        arguments: Its keyword arguments.
        text: Spec string that the arguments come from. If omitted, the call is shown with the one argument.
        name: Name of the component, for the call.

    Raises:
        UnimetricError: An argument has another type, is out of range, or is not one of the choices.
    """
    for key, value in arguments.items():
        allowed = allowed_values(part, key)
        if requirement(allowed, value):
            default = inspect.signature(part).parameters[key].default
            raise rejection(key, value, allowed, default, text or f"{name or part.__name__}({key}={value!r})")


def rejection(key: str, value: Any, allowed: Any, default: Any, text: str) -> UnimetricError:
    """Return the error for an argument whose value is not allowed.

    Args:
        key: Name of the argument.
        value: Its value.
        allowed: Resolved annotation.
        default: Default of the argument, or `inspect.Parameter.empty`.
        text: Spec string that the value comes from.
    """
    usual = f"change `{key}`" if default is inspect.Parameter.empty else f"the default is `{key}={default!r}`"
    return UnimetricError(f"`{key}` must be {requirement(allowed, value)}, got {value!r} in `{text}`", suggestion(allowed, value) or usual)


def suggestion(allowed: Any, value: Any) -> str:
    """Return a hint with the closest of several choices; nothing if no choice is close."""
    options = [str(option) for option in get_args(allowed)] if get_origin(allowed) is Literal else []
    near = closest(value, options) if isinstance(value, str) else ""
    return near if near.startswith("did") else ""


def checked(function: Function, *, name: str = "") -> Function:
    """Return the function with a check of its keyword arguments before each call.

    Args:
        function: Function, or the constructor of a class.
        name: Name that errors show. Defaults to the name of the function.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check(function, kwargs, name=name)
        return function(*args, **kwargs)

    return cast(Function, call)


def local_path(text: str) -> str:
    """Return the path of a `file://` URL, and any other text unchanged.

    >>> local_path("file:///data/a%20b.jpg"), local_path("data/a.jpg")
    ('/data/a b.jpg', 'data/a.jpg')
    """
    if text[:7].lower() != "file://":
        return text
    host, _, path = text[7:].partition("/")
    if host.lower() not in ("", "localhost") or not path:
        raise UnimetricError(f"a `file://` URL must have an absolute path of this machine, got `{text}`", "write `file:///data/images`")
    from urllib.request import url2pathname  # takes 50 ms to import

    return url2pathname(f"/{path}")
