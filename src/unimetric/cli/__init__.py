"""The command line: `app` has one function per command, and `main` runs it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from unimetric.cli import data, deploy, index, measure, serve, study, threshold, train, weights
from unimetric.cli.options import Command
from unimetric.errors import Interrupted, UnimetricError, explain

app = typer.Typer(
    help="Train image embeddings and evaluate them on new classes, shifts and datasets.",
    epilog="`--trust PACKAGE`, after any command, allows configs to name classes and functions of a package of yours.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # slow to import

        print(f"unimetric {version('unimetric')}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Version of the package.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train image embeddings and evaluate them on new classes, shifts and datasets."""


def _take_trust(words: list[str]) -> list[str]:
    """Take `--trust PACKAGE` out of the words, wherever it is.

    The environment passes it on to every process of a study.
    """
    rest, trusted = [], os.environ.get("UNIMETRIC_TRUST", "").replace(",", " ").split()
    remaining = iter(words)
    for word in remaining:
        option, equals, value = word.partition("=")
        if option != "--trust":
            rest.append(word)
            continue
        value = value if equals else next(remaining, "")
        if not value.isidentifier():
            raise UnimetricError(f"`--trust` must be followed by the name of a package, got `{value}`", "write `--trust mypackage`")
        trusted.append(value)
    if trusted:
        os.environ["UNIMETRIC_TRUST"] = ",".join(trusted)
    return rest


def main() -> None:
    """Run the command `unimetric`.

    An error that the user can fix is printed with a hint, and the exit code is 2.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names and terminals may not be UTF-8
    try:
        app(_take_trust(sys.argv[1:]), standalone_mode=True)
    except Interrupted as stop:
        print(f"stopped: {stop}", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        mistake = explain(error)
        if mistake is None:
            raise
        print(f"error: {mistake}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # outside of a command, which typer ends with the same code
        sys.exit(130)
    finally:
        # Python remembers a Ctrl-C that has left an `exec` of a string, such as that of a dataclass. `python -m` would then die of
        # SIGINT instead of returning the exit code. The next `exec` of a string forgets it.
        exec("")


# Groups and commands in the order of the help text.
_GROUPS: dict[str, dict[str, Callable[..., None]]] = {
    "Train": {"demo": train.demo, "check": train.check, "train": train.train},
    "Measure": {
        "evaluate": measure.evaluate,
        "calibrate": threshold.calibrate,
        "explain": measure.explain_,
        "adapt": measure.adapt,
        "transfer": measure.transfer,
        "shift": measure.shift,
        "ensemble": measure.ensemble,
        "figure": measure.figure,
    },
    "Study": {"bench": study.bench, "tune": study.tune, "report": study.report},
    "Ship": {
        "interpolate": weights.interpolate,
        "export": deploy.export,
        "index": index.index,
        "search": index.search,
        "serve": serve.serve,
        "audit": serve.audit,
        "watch": serve.watch,
    },
    "Data": {"list": data.list_, "configs": data.configs, "pack": data.pack, "split": measure.split},
}
for _group, _commands in _GROUPS.items():
    for _name, _command in _commands.items():
        app.command(_name, cls=Command, rich_help_panel=_group)(_command)
