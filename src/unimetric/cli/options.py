"""Arguments and options that several commands share."""

from __future__ import annotations

import re
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from unimetric.arguments import local_path
from unimetric.errors import UnimetricError, closest

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings as `key=value`. They replace those of the file. `unimetric list settings` explains them.", show_default=False
    ),
]
#: Settings of a command whose arguments are several paths.
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Setting as `key=value`, such as `device=cuda`.")]
IndexFolder = Annotated[Path, typer.Argument(help="Index folder.", metavar="INDEX")]
Device = Annotated[str, typer.Option(help="Device of the model: auto, cpu or cuda.")]
RayAddress = Annotated[str, typer.Option(help="Address of a Ray cluster; `auto` finds a running one, `local` starts one.")]
Results = Annotated[Path | None, typer.Option(help="JSON file for the results.")]


#: Earlier names of options, which keep working and are not in the help text.
OLD_NAMES = {
    "--looks": "--crops",
    "--look": "--embed",
    "--pictures": "--images",
    "--no-pictures": "--no-images",
    "--normalise": "--normalize",
}


class Command(TyperCommand):
    """Command that accepts old names of its options and `file://` URLs.

    Its help names the settings of a run.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Add the names of all settings to the help of a command that takes them."""
        if any(each.name == "settings" for each in self.params):
            from unimetric.config import RunConfig

            self.epilog = f"Settings: {', '.join(RunConfig.__dataclass_fields__)}. `unimetric list settings` explains them."
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace earlier names and `file://` URLs, and reject other URLs as paths."""
        known = {name for each in self.params for name in (*each.opts, *each.secondary_opts)}
        for index, word in enumerate(args):
            if word == "--":
                break
            name, equals, value = word.partition("=")
            if OLD_NAMES.get(name) in known:
                args[index] = OLD_NAMES[name] + equals + value
        args[:] = map(_use_local_path, args)
        rest = super().parse_args(ctx, args)
        for each in self.params:
            _check_local(each, ctx.params.get(each.name))
        return rest


def _use_local_path(word: str) -> str:
    """Return a word of a command with its `file://` URL as a path."""
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return option + equals + local_path(value)


def _check_local(parameter: Any, value: Any) -> None:
    """Raise an error for a path that was a URL, such as `s3:/bucket/run`.

    It would be below a folder `s3:` in the working directory.
    """
    for path in value if isinstance(value, list | tuple) else [value]:
        found = re.match(r"(\w{2,}):/", path.as_posix()) if isinstance(path, Path) else None
        if found:
            address = f"{found[1]}://{path.as_posix()[found.end() :]}"
            option = parameter.opts[0] if parameter.opts[0].startswith("--") else ""
            hint = f"use `{option} {path.name}`, and copy it there afterwards" if option else "copy it to this machine"
            raise UnimetricError(f"`{option or parameter.name}` must be a local path, got `{address}`", hint)


def check_outputs(*files: Path | None) -> None:
    """Raise an error before the work of a command if it cannot write one of its output files."""
    from unimetric.files import check_writable  # loads numpy

    for file in files:
        if file is not None:
            check_writable(file)


def write_json(out: Path | None, found: Any) -> None:
    """Write the results of a command to its JSON file, if there is one."""
    if out is not None:
        from unimetric.files import write_json as write  # loads numpy

        write(out, found)


def read_numbers(words: str, option: str, kind: type[int] | type[float], *, like: str) -> list[Any]:
    """Read the value of an option: numbers separated by commas, such as `like`."""
    try:
        return [kind(word) for word in words.split(",") if word.strip()]
    except ValueError:
        raise UnimetricError(f"`{option}` must be numbers separated by commas, got `{words}`", f"use `{option} {like}`") from None


def read_overrides(words: list[str] | None, command: Any, *, axes: bool = False) -> dict[str, Any]:
    """Read settings as `key=value`, and reject options and arguments written as settings.

    Args:
        words: Settings as typed.
        command: Function of the command.
        axes: Whether the settings are those of a grid, which may also name its axes.

    Returns:
        The settings by name.
    """
    from unimetric.config import RunConfig, override

    found = dict(override(word) for word in words or [])
    hints = get_type_hints(command, include_extras=True)
    for key, value in found.items():
        marks, known = getattr(hints.get(key), "__metadata__", ()), key in RunConfig.__dataclass_fields__
        if any(isinstance(mark, OptionInfo) for mark in marks):
            name = "--" + key.replace("_", "-")
            raise UnimetricError(f"`{key}={value}`: `{name}` is an option here, not a setting", f"write `{name} {quote(str(value))}`")
        if marks and known:
            raise UnimetricError(f"`{key}={value}`: `{key}` is an argument here, not a setting", f"write only one `{key}`")
        if not known and not axes:
            raise UnimetricError(f"settings: unknown key `{key}`", closest(key, RunConfig.__dataclass_fields__))
    return found
