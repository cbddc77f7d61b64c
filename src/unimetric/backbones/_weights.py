"""Read files of weights, and load them into a network by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unimetric.backbones._layouts import recognize
from unimetric.errors import UnimetricError


def read_weights(path: str, *, backbone: str = "") -> dict[str, Tensor]:
    """The tensors of a `.safetensors` or `.pth` file, without running any code that might be in it.

    If `backbone` is given, a file that is recognised as another backbone's is refused, with the name of the one that reads it.
    """
    file = Path(path).expanduser()
    hint = "give a .safetensors file, or a .pth file with a plain state dict"
    if not file.is_file():
        raise UnimetricError(f"{path}: no such weights file", "check the path after `weights=`")
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # each library has its own; all of them mean that the file is not what it should be
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UnimetricError(f"{path}: unreadable weights: {reason}", hint) from None
    for key in ("state_dict", "model", "teacher"):  # how training scripts wrap what they save
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not (isinstance(state, dict) and state and all(isinstance(value, Tensor) for value in state.values())):
        raise UnimetricError(f"{path}: no table of tensors in it", hint)
    for prefix in ("module.", "backbone.", "network."):  # what a training script, or a run of ours, puts in front of the network's names
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    layout = recognize(state)
    if backbone and layout.backbone != backbone and layout.sign:
        raise UnimetricError(
            f"{path}: these weights are laid out as {layout.name}, which `{backbone}` does not read",
            f"write backbone = \"{layout.backbone}(weights='{path}')\", or choose other weights",
        )
    return state


def fill(network: nn.Module, state: dict[str, Tensor], path: str, *, may_lack: tuple[str, ...] = (), layout: str = "") -> None:
    """Load weights by name; every parameter must be there and fit, or the error says which are not.

    What the network has no place for (a classifier) is left. `layout` is what the file was recognised as, for the error.
    """
    own = network.state_dict()
    lacking = [key for key in own if key not in state and not key.endswith("num_batches_tracked") and not key.startswith(may_lack)]
    wrong = [f"`{key}` is {tuple(state[key].shape)}, not {tuple(value.shape)}" for key, value in own.items() if _misfits(state, key, value)]
    if lacking or wrong:
        missing = _few([f"`{key}`" for key in lacking])
        what = [f"{len(lacking)} of {len(own)} missing: {missing}"] * bool(lacking) + [
            f"{len(wrong)} of other shapes: {_few(wrong)}"
        ] * bool(wrong)
        raise UnimetricError(
            f"{path}: weights of another architecture{f' (read as {layout})' * bool(layout)}: {'; '.join(what)}",
            f"these weights begin with `{next(iter(state), '')}`; choose the backbone they were made for",
        )
    network.load_state_dict({key: value for key, value in state.items() if key in own}, strict=False)


def _misfits(state: dict[str, Tensor], key: str, value: Tensor) -> bool:
    return key in state and state[key].shape != value.shape


def _few(words: list[str], most: int = 6) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
