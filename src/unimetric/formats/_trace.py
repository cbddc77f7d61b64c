"""Capture a model as one graph with free batch, height and width."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from unimetric.errors import UnimetricError, first_line


def trace(model: Any) -> torch.export.ExportedProgram:
    """Return the graph of a module that embeds uint8 images (B, H, W, 3).

    Raises:
        UnimetricError: The module branches on values, or on the number of images.
    """
    example = torch.zeros(2, 48, 40, 3, dtype=torch.uint8)
    free = torch.export.Dim.DYNAMIC
    reason = ""
    for strict in (False, True):  # the strict mode takes twice as long, and also captures calls such as `len(images)`
        try:
            with torch.no_grad(), quiet():
                return torch.export.export(model, (example,), dynamic_shapes={"images": {0: free, 1: free, 2: free}}, strict=strict)
        except Exception as error:  # torch.export raises many types
            reason = first_line(error)
    raise UnimetricError(f"the model cannot be captured as a graph: {reason}", "use `unimetric export` without `--to`")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings and logs of the exporters.

    torch also logs every step of a capture with a stack trace if any handler listens, which takes most of the time.
    """
    loggers = [logging.getLogger(name) for name in ("root", "torch.onnx", "torch.__trace")]  # onnxruntime warns through the root
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
