"""Export a run: as one folder with all weights, or in a format for other programs."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unimetric.analysis.calibrate import FILE as CALIBRATION
from unimetric.analysis.calibrate import read_calibration
from unimetric.analysis.evaluate import evaluate
from unimetric.config import RunConfig, from_settings
from unimetric.errors import UnimetricError, first_line
from unimetric.files import UNFINISHED, check_writable, is_temporary, make_folder, remove_stale, write_bytes, write_text
from unimetric.images.loading import Progress
from unimetric.images.pack import decode
from unimetric.images.table import Split, Table
from unimetric.kinds import Embed, Loss
from unimetric.metrics import measure
from unimetric.runs.embed import space_of
from unimetric.runs.exported import Exportable, embed_files
from unimetric.runs.folder import open_run, overridden, read_done, settings_of
from unimetric.runs.model import Model, loss_with_geometry, place
from unimetric.runs.record import count_images
from unimetric.runs.rows import read_table
from unimetric.runs.weights import write_tensors
from unimetric.spec import bind, create, parse, signature, text_of


def export(run: str | Path, out: str | Path, *, backbone: str = "") -> Path:
    """Write a folder with `config.toml` and all weights in `model.safetensors`.

    `evaluate`, `adapt` and `transfer` read it like a run folder. It has no training log, so a report skips it. LoRA is multiplied into
    the frozen weights, which removes the adapter and its cost. Absolute paths of the dataset are reduced to their last part. The
    calibrated threshold is copied.

    Args:
        run: Run folder.
        out: Output folder. An export that was killed there is repeated.
        backbone: Backbone spec string that locates the frozen weights, if they have moved.

    Returns:
        The output folder.
    """
    out = Path(out)
    _check_out(out)
    config, model = open_run(run, {"backbone": backbone} if backbone else None)
    calibrated = read_calibration(run) is not None
    make_folder(out, unfinished=True)
    (out / CALIBRATION).unlink(missing_ok=True)  # of an export that was killed
    if calibrated:
        write_bytes(out / CALIBRATION, (Path(run) / CALIBRATION).read_bytes())
    return write_model(config, model, out, Path(run).name)


def write_model(config: RunConfig, model: Model, out: Path, name: str) -> Path:
    """Write a model as `export` does.

    Args:
        config: Settings of the model.
        model: Model, whose adapter is merged if possible.
        out: Output folder. Files that a killed call has left are replaced.
        name: Name of the model in the notes of its file.

    Returns:
        The output folder.
    """
    exported = _merge(config, model)
    make_folder(out, unfinished=True)
    remove_stale(out)
    notes = {"exported": name, "run_id": config.run_id, "settings": settings_of(exported)}
    write_tensors(out / "model.safetensors", model.state_dict(), notes)
    write_text(out / "config.toml", exported.dump())
    (out / UNFINISHED).unlink()
    return out


def _merge(config: RunConfig, model: Model) -> RunConfig:
    """Merge the adapter of a model if possible, and return settings without local paths."""
    settings = asdict(merge_adapter(config, model)) | {"backbone": without_weights(config.backbone)}
    settings |= {key: without_folders(settings[key]) for key in ("dataset", "split")} | {"watch_datasets": ()}
    return from_settings(settings)


def merge_adapter(config: RunConfig, model: Model) -> RunConfig:
    """Merge the adapter into the weights if possible, and return the new settings."""
    adapted, model.backbone = model.backbone, model.backbone.merged()
    return config if model.backbone is adapted else replace(config, adapter="")


#: Largest loss of recall@1 by a lower precision.
MOST_LOST = 0.005


def export_as(
    run: str | Path,
    out: str | Path,
    *,
    to: str,
    backbone: str = "",
    images: int = 2000,
    force: bool = False,
    shift: str | Path = "",
    note: Callable[[str], None] = print,
    progress: Progress | None = None,
    **overrides: Any,
) -> Path:
    """Write a run in a format for other programs.

    Args:
        run: Run folder.
        out: Output file or folder.
        to: Format spec string, such as `onnx(precision='fp16')`.
        backbone: Backbone spec string that locates the frozen weights, if they have moved.
        images: Number of test images, in whole classes, on which recall@1 is compared with the model in
            torch; 0 to compare nothing.
        force: Whether to write a file that loses more than 0.5 points of recall@1.
        shift: JSON file of `unimetric shift` with this run, for a model card.
        note: Callback with a sentence about the result.
        progress: Callback with (done, all).
        overrides: Settings that may differ from training, such as `dataset`.

    Returns:
        The output.
    """
    out, form = Path(out), create("formats", to)
    _check_target(out, form.suffix)
    located = {"backbone": backbone} if backbone else {}
    config, model = open_run(run, located)
    found = overridden(config, overrides, run)
    loss = loss_with_geometry(found, model.dim)
    geometry = place(torch.zeros(1, model.dim), loss, found.geometry)[1]["geometry"]
    notes = _describe(Path(run), config, model, geometry) | {"shift": read_curve(shift, run) if shift else {}}
    notes["settings"] = asdict(_merge(config, model))
    model = Exportable(model.eval(), create("transforms", config.transform), normalize=geometry == "cosine").eval()
    comparison = Comparison(model, found, loss, images=images, force=force, note=note, progress=progress)
    # A format that rounds is useless if it loses the neighbors, so only a plain copy may be written without test images.
    if form.calibrated or (form.rounds and images and not force):
        _ = comparison.data

    def check(function: Embed) -> dict[str, Any]:
        if form.described:
            return {"intervals": _measure_intervals(run, progress, overrides | located)} if images else {}
        return comparison.check(function)

    form.write(model, out, notes=notes, images=comparison.training_images, check=check)
    return out


def _check_target(out: Path, suffix: str) -> None:
    """Raise an error unless a format can write its output there."""
    if suffix:
        check_writable(out)
    if suffix and out.suffix != suffix:
        raise UnimetricError(f"`--out` must be a {suffix} file, got {out}", f"use `--out {out.with_suffix(suffix).name}`")
    if suffix and out.exists():
        raise UnimetricError(f"{out}: exists", "choose another --out, or remove it")
    _check_out(out)


def _describe(run: Path, config: RunConfig, model: Model, geometry: str) -> dict[str, Any]:
    """Return what a file stores about its run."""
    line = read_done(run) if (run / "done").is_file() else {}
    return {
        "unimetric": version("unimetric"),
        "name": run.name,
        "run_id": config.run_id,
        "epoch": line.get("epoch"),
        "metrics": {key.removeprefix("test/"): value for key, value in line.items() if key.startswith("test/")},
        "images": count_images(run),
        "threshold": read_calibration(run) or {},
        "started_from": without_folders(config.backbone),
        "adapter": config.adapter,  # the settings have none if it was merged
        "dim": model.dim,
        "geometry": geometry,
        "normalized": geometry == "cosine",
    }


def read_curve(path: str | Path, run: str | Path) -> dict[str, Any]:
    """Return the curve of a run in a report of `unimetric shift`.

    Args:
        path: JSON file.
        run: Run folder. A report of several methods must name it.
    """
    try:
        methods = json.loads(Path(path).read_text(encoding="utf-8"))["methods"]
        name = Path(run).name if Path(run).name in methods else next(iter(methods))
        if len(methods) > 1 and name != Path(run).name:
            raise UnimetricError(f"{path}: has no method `{Path(run).name}`", f"it has: {', '.join(methods)}")
        distances = np.array(methods[name]["distances"], float).tolist()
        scores = {key: np.array(values, float).tolist() for key, values in methods[name]["scores"].items()}
        if {len(values) for values in scores.values()} != {len(distances)}:
            raise ValueError(f"`{name}` must have one score per distance and metric")
        return {"distances": distances, "scores": scores}
    except OSError as error:
        hint = f"write it with `unimetric shift {run} --out shift.json`, and use `--shift shift.json`"
        raise UnimetricError(f"{path}: cannot be read: {error.strerror}", hint) from None
    except (ValueError, KeyError, TypeError, StopIteration, AttributeError) as error:
        raise UnimetricError(f"{path}: not a report of `unimetric shift`: {error}", "use its `--out shift.json`") from None


def _measure_intervals(run: str | Path, progress: Progress | None, overrides: dict[str, Any]) -> dict[str, float]:
    """Return the test metrics of a run with 95 % intervals; nothing without the dataset."""
    try:
        return evaluate(run, level=0.95, progress=progress, **overrides)
    except UnimetricError as error:
        logging.getLogger("unimetric").warning("the model card has no intervals: %s", error.message)
        return {}


def check_repository(name: str) -> None:
    """Raise an error unless a text can be the name of a repository of the hub: `owner/name`."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
        valid = "/" in name
    except HFValidationError:
        valid = False
    if not valid:
        raise UnimetricError(f"`--push` must be `owner/name`, got `{name}`", "write `--push owner/name`")


def push_folder(folder: str | Path, repository: str) -> str:
    """Upload a folder of `--to hub` to the Hugging Face hub.

    Args:
        folder: Folder of the export.
        repository: `owner/name`. It is created if it does not exist.

    Returns:
        Address of the model.
    """
    import huggingface_hub

    check_repository(repository)
    hub = huggingface_hub.HfApi()
    try:
        address = hub.create_repo(repository, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=str(folder), commit_message="Upload model")
    except Exception as error:  # no connection, no permission: the hub raises many types
        hint = f"log in with `hf auth login`, and repeat `hf upload {repository} {folder}`; the folder is complete"
        raise UnimetricError(f"cannot upload {folder} to {repository}: {first_line(error)}", hint) from None
    return str(address)


class Comparison:
    """Recall@1 of an exported model next to that of the same model in torch.

    Args:
        model: Model in torch, in float32.
        config: Settings: dataset, split, geometry, workers.
        loss: Loss that declares the geometry, or None.
        images: Number of test images, in whole classes; 0 to compare nothing.
        force: Whether a loss of recall is only reported.
        note: Callback with the result as a sentence.
        progress: Callback with (done, all).
    """

    def __init__(
        self,
        model: Exportable,
        config: RunConfig,
        loss: Loss | None,
        *,
        images: int,
        force: bool,
        note: Callable[[str], None],
        progress: Progress | None,
    ) -> None:
        self.model, self.config, self.loss = model, config, loss
        self.images, self.force, self.note, self.progress = images, force, note, progress

    @functools.cached_property
    def data(self) -> tuple[Table, Split]:
        """The table of the images and its rows of training and test."""
        return read_table(self.config)

    def training_images(self) -> Iterator[np.ndarray]:
        """Yield training images in random order, (1, H, W, 3) each."""
        table, split = self.data
        order = np.random.default_rng(0).permutation(split.train)
        return (decode(table.paths[row])[None] for row in order)

    def _rows(self, table: Table, split: Split) -> np.ndarray:
        """Return the test images of as many random classes as needed."""
        labels = table.labels[split.test]
        classes, counts = np.unique(labels, return_counts=True)
        order = np.random.default_rng(0).permutation(len(classes))
        enough = max(2, int(np.searchsorted(counts[order].cumsum(), self.images)) + 1)
        return split.test[np.isin(labels, classes[order[:enough]])]

    def _recall(self, function: Embed, table: Table, rows: np.ndarray) -> tuple[float, Tensor]:
        vectors = embed_files(function, table.take(rows), workers=self.config.workers, progress=self.progress)
        space = space_of(vectors, table, rows, loss=self.loss, geometry=self.config.geometry)
        return measure(space, ["recall(k=1)"])["recall(k=1)"], vectors

    def check(self, function: Embed) -> dict[str, Any]:
        """Compare an exported model with the one in torch.

        Raises:
            UnimetricError: It loses more than `MOST_LOST` of recall@1.
        """
        if not self.images:
            return {}
        try:
            table, split = self.data
        except UnimetricError as error:
            self.note(f"recall@1 was not measured: {error.message}")
            return {}
        rows = self._rows(table, split)
        before, expected = self._recall(self.model.embed, table, rows)
        after, found = self._recall(function, table, rows)
        largest = float((expected - found).abs().max())
        lost = before - after
        self.note(
            f"recall@1 {after:.4f}, in torch with fp32 {before:.4f}, on {len(rows):,} test images; "
            f"largest difference of a coordinate {largest:.1e}"
        )
        if lost > MOST_LOST and not self.force:
            raise UnimetricError(
                f"this precision loses {100 * lost:.2f} points of recall@1, more than {100 * MOST_LOST:g}; nothing was written",
                "use a higher precision, such as fp16, or `--force`",
            )
        return {"check": {"recall(k=1)": after, "recall(k=1) in torch": before, "images": len(rows), "largest_difference": largest}}


def _check_out(out: Path) -> None:
    """Raise an error unless a path can be written, and is new or an empty folder.

    A folder that an export has left when it was killed counts as empty.
    """
    try:
        names = [each.name for each in out.iterdir()] if out.is_dir() else []
        free = UNFINISHED in names or all(map(is_temporary, names)) if out.is_dir() else not out.exists()
    except OSError as error:
        raise UnimetricError(f"{out}: cannot be read: {error.strerror}", "choose another --out") from None
    if not free:
        raise UnimetricError(f"{out}: must be an empty or new folder", "choose another --out")
    if not out.is_dir():
        check_writable(out)


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
