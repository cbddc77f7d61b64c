"""Weights from a hub, with a short timeout and a hint where to put a file instead."""

from __future__ import annotations

import functools
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import timm
from huggingface_hub import constants

#: Seconds to wait for the hub. Its own client repeats each request of each file for about a minute.
PATIENCE = 5.0


@functools.cache
def hub_answers(address: str) -> bool:
    """Return whether a server responds, through the proxies of the environment."""
    try:
        urllib.request.urlopen(address, timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def hub_without_waiting() -> Iterator[None]:
    """Use only downloaded files of the Hugging Face hub if it does not respond."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not hub_answers(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


#: Prefixes of names that are not those of timm: a repository of the Hugging Face hub, and a folder.
SOURCES = ("hf-hub:", "local-dir:")


def resolve_weights(name: str) -> str:
    """Return the name of a network of timm with the tag of its pretrained weights.

    >>> resolve_weights("resnet50"), resolve_weights("resnet50.tv_in1k")
    ('resnet50.a1_in1k', 'resnet50.tv_in1k')

    Args:
        name: Model name in timm, with or without a tag, or a name of another source, which is returned.
    """
    if name.startswith(SOURCES):
        return name
    try:
        found = timm.get_pretrained_cfg(name)
    except RuntimeError:  # an unknown tag
        return name
    return name if found is None or not found.tag else f"{found.architecture}.{found.tag}"


def advise_weights(name: str) -> str:
    """Return a hint for a network whose weights cannot be downloaded.

    Args:
        name: Model name in timm.
    """
    if name.startswith("hf-hub:"):
        return f"check the name after `hf-hub:` and the connection; downloaded models are read from {constants.HF_HUB_CACHE}"
    if name.startswith("local-dir:"):
        return "the folder needs `config.json` and `model.safetensors`, as `unimetric export --to hub` writes them"
    try:
        found = timm.get_pretrained_cfg(name)
    except RuntimeError:  # an unknown tag after the dot
        return f"see `timm.list_pretrained('{name.split('.')[0]}*')`"
    if found is None or not found.hf_hub_id:
        return f"timm has no downloadable weights for `{name}`; use `weights='file.safetensors'` for a local file"
    filename = found.hf_hub_filename or "model.safetensors"
    return (
        f"without a connection, download {constants.ENDPOINT}/{found.hf_hub_id}/resolve/main/{filename} elsewhere, copy it here, and "
        f"replace `pretrained=True` by `weights='path/to/{filename}'`; downloaded weights are read from {constants.HF_HUB_CACHE}"
    )
