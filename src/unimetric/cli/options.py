"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any, get_type_hints

import typer
from typer.models import OptionInfo

from unimetric.errors import UnimetricError, closest

Settings = Annotated[list[str] | None, typer.Argument(help="Settings as `key=value`, over those of the file.", show_default=False)]


def read_overrides(words: list[str] | None, verb: Any, *, axes: bool = False) -> dict[str, Any]:
    """Settings by name; an option of the verb is none of them. Only a grid has `axes`, whose names are the user's own."""
    from unimetric.config import RunConfig, override

    found = dict(override(word) for word in words or [])
    hints = get_type_hints(verb, include_extras=True)
    for key, value in found.items():
        if any(isinstance(mark, OptionInfo) for mark in getattr(hints.get(key), "__metadata__", ())):
            name = "--" + key.replace("_", "-")
            raise UnimetricError(f"`{key}={value}`: `{name}` is an option here, not a setting", f"write `{name} {value}`")
        if key not in RunConfig.__dataclass_fields__ and not axes:
            raise UnimetricError(f"settings: unknown key `{key}`", closest(key, RunConfig.__dataclass_fields__))
    return found
