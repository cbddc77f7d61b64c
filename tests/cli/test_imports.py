"""Imports of the commands: without garbage collection until PyTorch is loaded."""

from __future__ import annotations

import gc
import subprocess
import sys

from unimetric.cli.imports import importing


def run(code: str) -> None:
    """Run code in a process that has not imported PyTorch."""
    done = subprocess.run([sys.executable, "-c", f"import gc, sys\n{code}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_pauses_collection_and_freezes_the_objects() -> None:
    run(
        "from unimetric.cli.imports import importing\n"
        "with importing():\n"
        "    assert not gc.isenabled()\n"
        "    kept = [[] for _ in range(1000)]\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 1000\n"
        "assert not any(each is kept for each in gc.get_objects())"
    )


def test_importing_enables_collection_after_an_error() -> None:
    run(
        "from unimetric.cli.imports import importing\n"
        "try:\n"
        "    with importing():\n"
        "        import no_such_module\n"
        "except ModuleNotFoundError:\n"
        "    sys.exit(not gc.isenabled())\n"
        "sys.exit('no error')"
    )


def test_a_command_freezes_the_objects_of_pytorch() -> None:
    run(
        "from unimetric.cli import main\n"
        "sys.argv = ['unimetric', 'train', 'no_such']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    sys.exit(not (gc.isenabled() and gc.get_freeze_count() > 100_000))"
    )


def test_importing_does_nothing_once_pytorch_is_loaded() -> None:
    import torch  # noqa: F401

    frozen = gc.get_freeze_count()
    with importing():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_messages_after_the_last_line_of_python_are_hidden() -> None:
    """Those of extensions come after all that Python runs at its end, as those of the first handler here."""
    code = """
import atexit, os, sys
from types import ModuleType
atexit.register(os.write, 2, b"leaked 64 types")
from unimetric.cli.imports import importing
with importing():
    sys.modules["triton"] = ModuleType("triton")
atexit.register(os.write, 2, b"closed.")
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "closed.")
