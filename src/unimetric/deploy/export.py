"""A run as one folder that needs nothing else: what was trained, joined with the frozen weights that it was trained in."""

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
    """Write `config.toml` and `model.safetensors` with every weight; `evaluate`, `adapt` and `transfer` read it as they read a run.

    How it was trained stays behind, so that a report has nothing to show of it.

    What can be multiplied into the frozen weights is (LoRA): then no adapter remains, and the network is as fast as without.

    Args:
        run: a run folder.
        out: the folder to write.
        backbone: where the frozen weights lie now, if not where the run says.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UnimetricError(f"{out}: is in use", "choose another --out")
    config, model = open_run(run, backbone=backbone)
    settings = asdict(config) | {"backbone": without_weights(config.backbone)}
    if hasattr(model.backbone, "merged"):
        adapted, model.backbone = model.backbone, model.backbone.merged()
        if model.backbone is not adapted:
            settings["adapter"] = ""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnimetricError(f"{out}: cannot be made: {error.strerror}", "choose another --out") from None
    write_tensors(out / "model.safetensors", model.state_dict(), {"exported": str(Path(run).name), "run_id": config.run_id})
    write_text(out / "config.toml", from_settings(settings).dump())
    return out


def without_weights(text: str) -> str:
    """A backbone that is built without reading weights: they come from the file beside it.

    >>> without_weights("timm(name='vit_small_patch16_224', pretrained=True, image_size=224)")
    "timm(name='vit_small_patch16_224', image_size=224)"
    >>> without_weights("timm('vit_small_patch16_224', True, 'vit.safetensors')")
    "timm(name='vit_small_patch16_224')"
    >>> without_weights("efficientnet_lite")
    'efficientnet_lite(pretrained=False)'
    """
    name, (part, written) = parse(text).name, bind("backbones", text)  # by their names, also those that were written without
    named = {key: value for key, value in written.items() if key not in ("weights", "pretrained")}
    asked = signature(part).parameters.get("pretrained")
    if asked is not None and asked.default is True:  # its weights come by default
        named["pretrained"] = False
    return text_of(name, named)
