"""Export a run as one folder with all weights, trained and frozen."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from unimetric.config import from_settings
from unimetric.errors import UnimetricError
from unimetric.files import write_text
from unimetric.runs.folder import open_run
from unimetric.runs.weights import write_tensors
from unimetric.spec import bind, parse, signature, text_of


def export(run: str | Path, out: str | Path, *, backbone: str = "") -> Path:
    """Write a folder with `config.toml` and all weights in `model.safetensors`.

    `evaluate`, `adapt` and `transfer` read it like a run folder. It has no training log, so a report skips it. LoRA is multiplied into
    the frozen weights, which removes the adapter and its cost.

    Args:
        run: Run folder.
        out: Output folder.
        backbone: Backbone spec string that locates the frozen weights, if they have moved.

    Returns:
        The output folder.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UnimetricError(f"{out}: must be an empty or new folder", "choose another --out")
    config, model = open_run(run, backbone=backbone)
    settings = asdict(config) | {"backbone": without_weights(config.backbone)}
    adapted, model.backbone = model.backbone, model.backbone.merged()
    if model.backbone is not adapted:
        settings["adapter"] = ""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnimetricError(f"{out}: cannot be created: {error.strerror}", "choose another --out") from None
    write_tensors(out / "model.safetensors", model.state_dict(), {"exported": str(Path(run).name), "run_id": config.run_id})
    write_text(out / "config.toml", from_settings(settings).dump())
    return out


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
