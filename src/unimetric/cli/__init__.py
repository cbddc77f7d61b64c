"""The command line: `app` has one function per command, and `main` runs it."""

from __future__ import annotations

import io
import sys

import typer

from unimetric.cli import data, deploy, measure, study, train
from unimetric.errors import FULL_DISK, Interrupted, UnimetricError

app = typer.Typer(
    help="Train image embeddings, and measure them on classes, shifts and datasets never seen.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The command `unimetric`: mistakes that the user can mend end with a sentence, a hint and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name need not be UTF-8, nor the terminal
    try:
        app(standalone_mode=True)
    except UnimetricError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        print(f"error: {error.filename or 'the disk is full'}: {error.strerror}\n\nhint: free some room", file=sys.stderr)
        sys.exit(2)
    except Interrupted as stop:
        print(f"stopped: {stop}", file=sys.stderr)
        sys.exit(130)


# The order of the help page.
app.command()(train.train)
app.command()(measure.evaluate)
app.command("list")(data.list_)
app.command()(train.check)
app.command()(data.pack)
app.command("explain")(measure.explain_)
app.command()(measure.split)
app.command()(measure.adapt)
app.command()(measure.transfer)
app.command()(measure.shift)
app.command()(study.bench)
app.command()(study.tune)
app.command()(study.report)
app.command()(deploy.export)
app.command()(measure.ensemble)
app.command()(measure.figure)
app.command()(train.demo)
