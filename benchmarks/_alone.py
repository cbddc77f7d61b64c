"""Run a function in a process of its own, so that memory of one measurement does not change the next."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


def run_alone(function: Callable[..., Any], *arguments: Any, limit: float | None = None) -> Any:
    """Return the result of a function that runs in a new process.

    Args:
        function: Function of a module.
        arguments: Its arguments.
        limit: Longest time in seconds; None for no limit.

    Raises:
        TimeoutError: The limit was reached. The process is killed.
        EOFError: The process ended without a result, for example because it was killed.
    """
    hear, speak = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_send, args=(speak, function, arguments))
    process.start()
    speak.close()
    try:
        if not hear.poll(limit):
            raise TimeoutError
        return hear.recv()
    finally:
        process.kill()
        process.join()


def _send(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    pipe.send(function(*arguments))
