"""Export a run as one folder with all weights, trained and frozen."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from unimetric.config import from_settings
from unimetric.errors import UnimetricError
from unimetric.files import is_temporary, remove_stale, write_text
from unimetric.runs.folder import open_run, settings_of
from unimetric.runs.weights import write_tensors
from unimetric.spec import bind, parse, signature, text_of


def export(run: str | Path, out: str | Path, *, backbone: str = "") -> Path:
    """Write a folder with `config.toml` and all weights in `model.safetensors`.

    `evaluate`, `adapt` and `transfer` read it like a run folder. It has no training log, so a report skips it. LoRA is multiplied into
    the frozen weights, which removes the adapter and its cost. Absolute paths of the dataset are reduced to their last part.

    Args:
        run: Run folder.
        out: Output folder. An export that was killed there is repeated.
        backbone: Backbone spec string that locates the frozen weights, if they have moved.

    Returns:
        The output folder.
    """
    out = Path(out)
    _check_out(out)
    config, model = open_run(run, backbone=backbone)
    settings = asdict(config) | {"backbone": without_weights(config.backbone)}
    settings |= {key: without_folders(settings[key]) for key in ("dataset", "split")}
    adapted, model.backbone = model.backbone, model.backbone.merged()
    if model.backbone is not adapted:
        settings["adapter"] = ""
    exported = from_settings(settings)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / UNFINISHED).touch()
    except OSError as error:
        raise UnimetricError(f"{out}: cannot be created: {error.strerror}", "choose another --out") from None
    remove_stale(out)
    notes = {"exported": str(Path(run).name), "run_id": config.run_id, "settings": settings_of(exported)}
    write_tensors(out / "model.safetensors", model.state_dict(), notes)
    write_text(out / "config.toml", exported.dump())
    (out / UNFINISHED).unlink()
    return out


#: File in the folder of an export that is being written. An export that was killed leaves it, and can be repeated.
UNFINISHED = ".unfinished"


def _check_out(out: Path) -> None:
    """Raise an error unless a folder is new, empty, or left by an export that was killed."""
    try:
        names = [each.name for each in out.iterdir()] if out.is_dir() else []
        free = UNFINISHED in names or all(map(is_temporary, names)) if out.is_dir() else not out.exists()
    except OSError as error:
        raise UnimetricError(f"{out}: cannot be read: {error.strerror}", "choose another --out") from None
    if not free:
        raise UnimetricError(f"{out}: must be an empty or new folder", "choose another --out")


def without_folders(text: str) -> str:
    r"""Reduce the absolute paths in a spec string to their last part.

    The folders are of no use on another machine.

    >>> without_folders("folder(root='/data/birds', train=0.5)")
    "folder(root='birds', train=0.5)"
    >>> without_folders("union(parts=['cub200', 'folder(root=\"/data/birds\")'])")
    'union(parts=[\'cub200\', "folder(root=\'birds\')"])'
    >>> without_folders("pack(path='cars.pack')")
    "pack(path='cars.pack')"
    """
    call = parse(text)
    named = {key: _without_folders(value) for key, value in call.named.items()}
    words = [repr(_without_folders(value)) for value in call.positional] + [f"{key}={value!r}" for key, value in named.items()]
    return f"{call.name}({', '.join(words)})" if words else call.name


def _without_folders(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_without_folders, value))
    if not isinstance(value, str):
        return value
    for kind in (PurePosixPath, PureWindowsPath):
        if kind(value).is_absolute() or value.startswith("~"):
            return kind(value).name
    try:
        return without_folders(value) if "(" in value else value
    except UnimetricError:  # not a spec string
        return value


def without_weights(text: str) -> str:
    """Remove the weights from a backbone spec string, because the exported file contains them.

    >>> without_weights("timm(name='vit_small_patch16_224', pretrained=True, image_size=224)")
    "timm(name='vit_small_patch16_224', image_size=224)"
    >>> without_weights("timm('vit_small_patch16_224', True, 'vit.safetensors')")
    "timm(name='vit_small_patch16_224')"
    >>> without_weights("efficientnet_lite")
    'efficientnet_lite(pretrained=False)'
    """
    name, (part, written) = parse(text).name, bind("backbones", text)  # all arguments by name
    named = {key: value for key, value in written.items() if key not in ("weights", "pretrained")}
    pretrained = signature(part).parameters.get("pretrained")
    if pretrained is not None and pretrained.default is True:
        named["pretrained"] = False
    return text_of(name, named)
