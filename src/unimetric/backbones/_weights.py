"""Read weights files, and load them into a network by name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unimetric.backbones._layouts import recognize
from unimetric.errors import UnimetricError, first_line


def read_weights(path: str, *, backbone: str = "") -> dict[str, Tensor]:
    """Read the tensors of a `.safetensors` or `.pth` file without running code in it.

    Args:
        path: Path of the file.
        backbone: Name of the backbone. If given, a file recognized as that of another backbone is
            an error with the name of the backbone that reads it.
    """
    file = Path(path).expanduser()
    hint = "use a .safetensors file, or a .pth file with a plain state dict"
    if not file.is_file():
        raise UnimetricError(f"{path}: no such weights file", "check the path after `weights=`")
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # the message of torch advises to run the code of the file
        reason = "it does not hold plain tensors, and other objects are not opened because they could run code"
        raise UnimetricError(f"{path}: unreadable weights: {reason}", hint) from None
    except Exception as error:  # each library raises other types, all for an invalid file
        raise UnimetricError(f"{path}: unreadable weights: {first_line(error)}", hint) from None
    for key in ("state_dict", "model", "teacher"):  # keys under which training scripts store the weights
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    named = isinstance(state, dict) and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items())
    if not (named and state):
        raise UnimetricError(f"{path}: must contain a table of tensors by name", hint)
    for prefix in ("module.", "backbone.", "network."):  # prefixes added by training scripts or by Unimetric runs
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    layout = recognize(state)
    if backbone and layout.backbone != backbone and layout.sign:
        raise UnimetricError(
            f"{path}: these weights are laid out as {layout.name}, which `{backbone}` does not read",
            f"use backbone = \"{layout.backbone}(weights='{path}')\", or other weights",
        )
    return state


def fill(network: nn.Module, state: dict[str, Tensor], path: str, *, layout: str = "") -> None:
    """Load weights by name. Every parameter must be present with the right shape.

    Extra weights, such as those of a classifier, are ignored.

    Args:
        network: Network to fill.
        state: Weights, by name.
        path: Path of the file, for the error message.
        layout: Recognized layout of the file, for the error message.
    """
    own = network.state_dict()
    lacking: list[str] = []
    wrong: list[str] = []
    for key, value in own.items():
        if key in state:
            if state[key].shape != value.shape:
                wrong.append(f"`{key}` is {tuple(state[key].shape)}, not {tuple(value.shape)}")
        elif not key.endswith("num_batches_tracked"):
            lacking.append(f"`{key}`")
    problems: list[str] = []
    if lacking:
        problems.append(f"{len(lacking)} of {len(own)} missing: {_list_first(lacking)}")
    if wrong:
        problems.append(f"{len(wrong)} of other shapes: {_list_first(wrong)}")
    if problems:
        read_as = f" (read as {layout})" if layout else ""
        raise UnimetricError(
            f"{path}: weights of another architecture{read_as}: {'; '.join(problems)}",
            f"these weights begin with `{next(iter(state), '')}`; use the backbone they belong to",
        )
    network.load_state_dict({key: value for key, value in state.items() if key in own}, strict=False)


def _list_first(words: list[str]) -> str:
    text = ", ".join(words[:6])
    return f"{text} and {len(words) - 6} more" if len(words) > 6 else text
