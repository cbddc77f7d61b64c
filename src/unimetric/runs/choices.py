"""Settings for a folder of images, chosen by its content and by the device."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unimetric.config import RunConfig, load
from unimetric.errors import UnimetricError
from unimetric.images.table import Table, describe_shared
from unimetric.runs.rows import make_split
from unimetric.spec import create, text_of

#: Training images per run, all epochs together, by config.
IMAGES = {"laptop": 6_000, "foundation": 60_000}


def choose_settings(root: str, overrides: dict[str, Any]) -> tuple[RunConfig, list[str]]:
    """Choose the settings of a run on a folder of images.

    Args:
        root: Folder of images; see the dataset `folder`.
        overrides: Settings by name, which replace the chosen ones.

    Returns:
        The settings, and one sentence per choice.

    Raises:
        UnimetricError: The folder cannot be split into training and test classes.
    """
    if Path(root, "config.toml").is_file():
        raise UnimetricError(f"{root}: is a run folder, not a folder of images", f"write `{root}/config.toml --out {root}` to resume it")
    device = str(overrides.get("device", "auto"))
    cuda = torch.cuda.is_available() and not device.startswith("cpu")
    name = "foundation" if cuda else "laptop"
    hardware = torch.cuda.get_device_name() if cuda else f"a CPU with {os.cpu_count()} cores"
    dataset, table, notes = choose_dataset(root)
    classes = len(np.unique(table.labels))
    if classes < 4 and "split" not in overrides:
        raise UnimetricError(
            f"{root}: at least 4 classes are needed, two to train on and two to test on, got {classes}",
            "add classes: each subfolder that contains images is one",
        )
    notes = [f"device: {hardware}, so the settings are those of the config `{name}`", *notes]
    chosen: dict[str, Any] = {"dataset": dataset}
    training = len(np.unique(table.labels[table.train]))
    if training < 10 and "split" not in overrides:
        chosen["split"] = "standard"
        notes.append(f"{training} training classes are too few to hold some out, so the best epoch is chosen on the test classes")
    split = make_split(load(name, **chosen | overrides), table)
    images = len(split.train)
    chosen["epochs"] = max(1, min(20, round(IMAGES[name] / images)))
    evaluations = chosen["epochs"] * images // (len(split.validation) + len(split.test))  # they take no longer than training
    chosen["evaluate_every"] = math.ceil(chosen["epochs"] / max(1, min(4, evaluations)))
    counts = [len(np.unique(table.labels[rows])) for rows in (split.train, split.validation, split.test)]
    notes.append(f"{images:,} training images of {counts[0]} classes; {counts[1]} validation classes; {counts[2]} test classes")
    return load(name, **chosen | overrides), notes


def choose_dataset(root: str) -> tuple[str, Table, list[str]]:
    """Choose how a folder of images is read.

    Args:
        root: Folder of images.

    Returns:
        The spec string of the dataset, its table, and one sentence per choice.
    """
    arguments: dict[str, Any] = {"root": str(Path(root)), "on_single": "skip"}  # the shell adds a slash when it completes a name
    notes = []
    logger = logging.getLogger("unimetric")
    level = logger.level
    logger.setLevel(logging.ERROR)  # warnings about the parts are wrong if the classes are split in another way
    try:
        shared = bool(describe_shared(create("datasets", text_of("folder", arguments))))
    except UnimetricError as error:
        if "no part `test`" not in error.message:
            raise
        shared = True
    finally:
        logger.setLevel(level)
    if shared:
        arguments["train"] = 0.5
        notes.append("training and test parts do not differ in classes, so half of all classes become test classes")
    text = text_of("folder", arguments)
    table = create("datasets", text)
    return text, table, [f"{len(table):,} images of {len(np.unique(table.labels)):,} classes in `{root}`", *notes]


def differing_settings(config: RunConfig) -> str:
    """Return the settings that are not the defaults as the text of a config file."""
    defaults = RunConfig()
    keep = [field.name for field in fields(config) if getattr(config, field.name) != getattr(defaults, field.name)]
    return "".join(f"{line}\n" for line in config.dump().splitlines() if line.partition(" = ")[0] in keep)
