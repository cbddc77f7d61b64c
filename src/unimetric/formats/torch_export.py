"""torch.export: one file from pixels to embeddings, for AOTInductor and torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unimetric.errors import UnimetricError
from unimetric.files import atomic
from unimetric.formats._trace import quiet, trace
from unimetric.kinds import Check, Embed, Format, Images

#: Name of the notes in a file.
NOTES = "unimetric.json"


class TorchExport(Format):
    """One `.pt2` file of torch.export, from pixels to embeddings.

    It contains what `onnx` contains, with the same input and output. `torch._inductor.aoti_compile_and_package` compiles the loaded
    program for C++.

    `torch.export.load` unpickles parts of a file. Load only your own files; `evaluate` loads none.

    Reference:
        PyTorch 2: faster machine learning through dynamic Python bytecode transformation and graph compilation (Ansel et al., ASPLOS 2024).
    """

    suffix = ".pt2"

    def write(self, model: Any, path: Path, *, notes: dict[str, Any], images: Images, check: Check) -> None:
        program = trace(model)
        notes = notes | check(_runner(program))
        with atomic(path) as temporary, quiet(), open(temporary, "wb") as file:
            torch.export.save(program, file, extra_files={NOTES: json.dumps(notes)})

    def read(self, path: Path) -> tuple[Embed, dict[str, Any]]:
        # torch.export.load unpickles tensors and example inputs, so that a file from somebody else could run code.
        raise UnimetricError(
            f"{path}: opening a .pt2 file may run code of the file", "evaluate the run folder, or export it with `--to onnx`"
        )


def _runner(program: torch.export.ExportedProgram) -> Embed:
    module = program.module()

    @torch.inference_mode()
    def run(images: np.ndarray) -> np.ndarray:
        return module(torch.from_numpy(images)).numpy()

    return run
