"""Folder of the Hugging Face hub: a network of timm with a model card."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from string import Template
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from unimetric.errors import UnimetricError, first_line
from unimetric.files import UNFINISHED, atomic, make_folder, system_error, write_json, write_text
from unimetric.kinds import Check, Embed, Format, Images

_HINT = "use `--to onnx`, which contains any model, or `unimetric export` without `--to`"


class Hub(Format):
    """Folder for `timm.create_model("local-dir:...", pretrained=True)`, with a model card.

    The embedding layer is the classifier of the network, so the run needs a network of timm, `head =
    "linear"` or `"identity"`, and no adapter that adds layers. Its output is bit-identical to that of the
    run. It has no L2 normalization.

    Reference:
        PyTorch image models (Wightman, 2019).
    """

    described = True

    def write(self, model: Any, path: Path, *, notes: dict[str, Any], images: Images, check: Check) -> None:
        network = _find_network(model.model)
        config = _describe_network(network, model)
        tensors = _tensors(network, model.model.head)
        _compare(model, config, tensors)
        card = write_card(notes | check(model.embed), network.pretrained_cfg)
        make_folder(path, unfinished=True)
        with atomic(path / "model.safetensors") as temporary:
            try:
                save_file(tensors, temporary, {"format": "pt"})
            except SafetensorError as error:  # safetensors reports a full disk this way
                raise system_error(error) from None
            temporary.chmod(0o644)  # safetensors writes files that only the owner can read
        write_json(path / "config.json", config)
        write_text(path / "README.md", card)
        (path / UNFINISHED).unlink()

    def read(self, path: Path) -> tuple[Embed, dict[str, Any]]:
        raise UnimetricError(f"{path}: a folder of the hub has no settings of a run", f"use `backbone = \"timm(name='local-dir:{path}')\"`")


def _find_network(model: Any) -> Any:
    """Return the network of timm of a model, or raise an error if timm has nothing equal."""
    network: Any = dict(model.backbone.named_children()).get("network")
    if network is None or "pretrained_cfg" not in vars(network):
        raise UnimetricError(f"`--to hub` requires a network of timm without inserted layers, got `{type(model.backbone).__name__}`", _HINT)
    head = model.head
    if list(dict(head.named_children())) not in ([], ["layer"]) or (list(head.parameters()) and head.pool != "summary"):
        raise UnimetricError(f"`--to hub` requires the head `linear` or `identity`, got `{type(head).__name__}`", _HINT)
    return network


def _tensors(network: Any, head: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of the network, with the embedding layer as its classifier."""
    name = network.pretrained_cfg.get("classifier")
    layers = {f"{name}.{key.removeprefix('layer.')}": value for key, value in head.state_dict().items()}
    return {key: value.detach().cpu().contiguous().clone() for key, value in (network.state_dict() | layers).items()}


def _describe_network(network: Any, model: Any) -> dict[str, Any]:
    """Return the content of `config.json`.

    The size of the images is an argument of a transformer, not only of its transform.
    """
    known = {key: network.pretrained_cfg.get(key) for key in ("tag", "license", "classifier", "first_conv")}
    recipe, head = model.recipe, model.model.head
    arguments: dict[str, Any] = {}
    patches = dict(network.named_children()).get("patch_embed")
    if patches is not None and "img_size" in vars(patches):
        arguments["img_size"] = recipe.size
    layer = dict(head.named_children()).get("layer")
    if layer is not None and layer.bias is None:
        raise UnimetricError("`--to hub` requires `linear(bias=True)`: the classifier of timm has a bias", _HINT)
    crop = math.floor(1e6 * recipe.size / recipe.resize) / 1e6  # timm divides by it and rounds down
    return {
        "architecture": network.pretrained_cfg["architecture"],
        "num_classes": 0 if layer is None else model.model.dim,
        "num_features": network.num_features,
        **({"model_args": arguments} if arguments else {}),
        "pretrained_cfg": {
            **{key: value for key, value in known.items() if value},
            "input_size": [3, recipe.size, recipe.size],
            "interpolation": recipe.interpolation,
            "crop_pct": min(crop, 1.0),
            "crop_mode": "center",
            "mean": list(model.model.mean),
            "std": list(model.model.std),
            "num_classes": 0 if layer is None else model.model.dim,
        },
    }


def _compare(model: Any, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Raise an error unless timm opens a network with the same output."""
    import timm

    size = config["pretrained_cfg"]["input_size"]
    images = torch.randn(2, *size, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(config))
        try:
            opened = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        except Exception as error:  # other arguments or shapes: timm raises many types
            raise UnimetricError(f"timm cannot open the network: {first_line(error)}", _HINT) from None
    with torch.inference_mode():
        opened = opened.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch has no overload for it
        if not torch.equal(opened(images), model.model(images)[0]):
            raise UnimetricError("the network in timm has another output than the model of the run", _HINT)


# --- The model card ----------------------------------------------------------------------------------

#: For each geometry: what images of one class have, and the code that compares two embeddings.
_COMPARISONS = {
    "cosine": ("a high cosine similarity", "print(torch.nn.functional.cosine_similarity(embeddings[0], embeddings[1], dim=0))"),
    "inner": ("a high inner product", "print(embeddings[0] @ embeddings[1])  # inner product"),
    "euclidean": ("a small Euclidean distance", "print(-torch.dist(embeddings[0], embeddings[1]))  # minus the Euclidean distance"),
    "poincare": ("a small distance in the Poincaré ball of the loss", "print(embeddings)  # the loss maps them into the Poincaré ball"),
}


def write_card(notes: dict[str, Any], weights: Any) -> str:
    """Return the text of a model card.

    Args:
        notes: Notes of the export: settings, metrics, intervals, shift, threshold.
        weights: `pretrained_cfg` of the network: tag and license of its weights.
    """
    settings = notes["settings"]
    training = {
        "dataset": settings["dataset"],
        "split": settings["split"],
        **{f"{part} images": f"{images:,} of {classes:,} classes" for part, (images, classes) in (notes.get("images") or {}).items()},
        "started from": notes["started_from"],
        "adapter": notes["adapter"] or "none",
        "loss": settings["loss"] if settings["objective"] == "plain" else f"{settings['loss']}, {settings['objective']}",
        "optimizer": f"{settings['optimizer']}, batches of {settings['batch_size']}",
        "epochs": f"{settings['epochs'] if notes['epoch'] is None else notes['epoch']} of {settings['epochs']}",
        "transform": settings["transform"],
    }
    near, compare = _COMPARISONS[notes["geometry"]]
    license_, rights = _license(notes["started_from"], weights)
    return Template((Path(__file__).parent / "card.md").read_text(encoding="utf-8")).substitute(
        name=notes["name"],
        near=near,
        compare=compare,
        dim=notes["dim"],
        unimetric=notes["unimetric"],
        run_id=notes["run_id"],
        license=license_,
        rights=rights,
        training="\n".join(f"| {key} | `{value}` |" for key, value in training.items()),
        results=_results(notes),
        shift=_shift(notes.get("shift") or {}),
        threshold=_threshold(notes.get("threshold") or {}),
    )


def _license(backbone: str, weights: Any) -> tuple[str, str]:
    """Return the license of the starting weights: its identifier, and a sentence."""
    name = ".".join(filter(None, [weights.get("architecture"), weights.get("tag")]))
    listed = weights.get("license")
    if "pretrained=True" in backbone:
        if not listed:
            return "unknown", f"The run started from the weights `{name}` of timm, which lists no license for them."
        return listed, f"The run started from the weights `{name}` of timm. Their license is `{listed}`, and applies to this model as well."
    if "weights=" in backbone:
        hint = f" The license of timm's own weights `{name}` is `{listed}`." if listed else ""
        return "unknown", f"The run started from a local file, see above. Its license is not known here.{hint}"
    return "unknown", "The run started from random weights, or from weights that come with their package. No license was chosen."


def _results(notes: dict[str, Any]) -> str:
    """Return a table of the test metrics, with intervals if they were measured."""
    measured = notes.get("intervals") or {}
    values = {key: value for key, value in (measured or notes["metrics"]).items() if not key.endswith(("/from", "/to"))}
    if not values:
        return "Not measured."
    rows = ["| metric | test classes | 95 % interval |", "|---|---|---|"]
    for key, value in values.items():
        low, high = measured.get(f"{key}/from"), measured.get(f"{key}/to")
        interval = "" if low is None or high is None else f"{low:.4f} to {high:.4f}"
        rows.append(f"| `{key}` | {value:.4f} | {interval} |")
    return "\n".join([*rows, "", "The test classes were not trained on. Intervals are over whole classes."])


def _shift(curve: dict[str, Any]) -> str:
    """Return a table of the results on splits of growing distance."""
    if not curve:
        return "Not measured. Expect lower values on images that differ more from the training images than the test images do."
    names = list(curve["scores"])
    rows = [f"| Fréchet distance | {' | '.join(f'`{name}`' for name in names)} |", "|" + "---|" * (1 + len(names))]
    for number, distance in enumerate(curve["distances"]):
        cells = [f"{curve['scores'][name][number]:.4f}" for name in names]
        rows.append(f"| {distance:.1f} | {' | '.join(cells)} |")
    return "\n".join([*rows, "", "A larger distance between training and test classes is a harder split."])


def _threshold(found: dict[str, Any]) -> str:
    if not found:
        return "Not calibrated. `unimetric calibrate` chooses one on validation classes."
    text = (
        f"Two images are of one class if their similarity ({found['score']}) exceeds {found['threshold']:.4f}. On validation classes, "
        f"at most {found['fpr']:.2%} of the pairs of two classes exceed it."
    )
    if "test" not in found:
        return text
    return f"{text} On test classes, {found['test']['fpr']:.2%} do, and {found['test']['fnr']:.2%} of the pairs of one class do not."
