"""Settings of a run: one flat table, with the same keys in files and on the command line.

This module does not import torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from unimetric.arguments import Count, Form, Natural, NonNegative, Range, Seed, requirement, suggestion
from unimetric.errors import UnimetricError, closest, locating
from unimetric.spec import OFFERED, bind_arguments, declaration, find, names, parse

#: Precisions of Lightning Fabric, and `auto`.
Precision = Literal[
    "auto",
    "32-true",
    "bf16-mixed",
    "16-mixed",
    "bf16-true",
    "16-true",
    "64-true",
    "transformer-engine",
    "transformer-engine-float16",
    "16",
    "32",
    "64",
    "bf16",
]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run.

    A setting that names a component is the singular of the component's folder.

    Args:
        dataset: Dataset spec string: images and labels.
        split: Split spec string: training and test rows.
        transform: Transform spec string: random crops and color changes.
        backbone: Backbone spec string: images to tokens.
        adapter: Adapter spec string: parameters inserted into a frozen backbone. Empty to train the backbone itself.
        head: Head spec string: tokens to embeddings.
        objective: Objective spec string: the terms to minimize.
        loss: Loss spec string.
        miner: Miner spec string. Empty for the default miner of the loss.
        sampler: Sampler spec string: the rows of each batch.
        optimizer: Optimizer spec string.
        schedule: Schedule spec string.
        metrics: Metric spec strings, evaluated on the test classes, and on the validation classes if there are any. `train: ` before
            one evaluates it on the training images, as in `train: spectral_decay`. The first metric selects the best epoch, so it
            must not be a structure metric.
        chosen_by: Number of leading metrics whose sum selects the best epoch: 2 for recall@1 + mAP@1000, as in ooDML. A metric for
            which lower is better is subtracted.
        watch_datasets: Dataset spec strings of other datasets. Their standard test classes are evaluated before the first epoch and
            with the weights of the best epoch, to see what training has changed elsewhere. They select nothing.
        geometry: Geometry of the evaluation: `cosine`, `euclidean` (L2 distance of raw embeddings), `inner` (inner product of raw
            embeddings) or `poincare` (only for a loss with a curvature). Empty for that of the loss.
        epochs: Passes over the training images.
        batch_size: Images per step, summed over all devices.
        seed: Seed of all random generators.
        precision: Precision in the terms of Lightning Fabric, such as `32-true` or `bf16-mixed`; `auto` is bf16 on a GPU and
            float32 elsewhere.
        device: `auto`, `cpu` or `cuda`, with the number of devices after a colon: `cuda:4`.
        strategy: Strategy of Lightning Fabric for several devices.
        compile: Whether model, objective and crops on a GPU are compiled with torch.compile.
        clip_norm: Largest norm of the gradient; 0 disables clipping.
        clip_value: Largest absolute entry of the gradient; 0 disables clipping.
        head_lr_scale: Learning rate of the head as a multiple of that of the backbone.
        warmup_epochs: Initial epochs that train only the head and the loss.
        evaluate_every: Epochs between evaluations; 0 evaluates after the last epoch only.
        checkpoint_every: Epochs between checkpoints.
        evaluate_batch: Images per batch in evaluation; 0 is 256 on a GPU and 32 elsewhere, where more take memory and no less time.
        residence: Location of packed images: `device`, `host`, `stream` (decoded on demand) or `auto`.
        workers: Processes that decode streamed images.
        on_bad_picture: `error` stops at an unreadable image; `skip` skips and lists it.
        logger: `tensorboard`, `csv`, `wandb`, `mlflow` or `none`. mlflow writes to `mlflow.db` in the run folder, or to
            `MLFLOW_TRACKING_URI`.
    """

    dataset: str = "glyphs"
    split: str = "standard"
    transform: str = "base"
    backbone: str = "small"
    adapter: str = ""
    head: str = "linear(dim=128)"
    objective: str = "plain"
    loss: str = "margin"
    miner: str = ""
    sampler: str = "samples_per_class(n=2)"
    optimizer: str = "adam(lr=1e-5, weight_decay=4e-4)"
    schedule: str = "constant"
    metrics: Annotated[tuple[str, ...], Range(1)] = ("recall(k=1)",)
    chosen_by: Count = 1
    watch_datasets: tuple[str, ...] = ()
    geometry: Literal["", "cosine", "euclidean", "inner", "poincare"] = ""
    epochs: Count = 10
    batch_size: Annotated[int, Range(2, 2**20)] = 112
    seed: Seed = 0
    precision: Precision = "auto"
    device: Annotated[str, Form(r"(auto|cpu|cuda|gpu|mps|tpu)(:[1-9]\d*)?", "`auto`, `cpu` or `cuda`, with a number as in `cuda:4`")] = (
        "auto"
    )
    strategy: Annotated[  # those that start a function in their processes would need one instead of the loop
        str,
        Form(
            r"auto|dp|(ddp|fsdp|deepspeed|xla)(_(?!\w*(spawn|fork|notebook))\w+)?|single_\w+",
            "`auto`, or `ddp`, `fsdp` or another strategy of Fabric without spawn, fork or notebook",
        ),
    ] = "auto"
    compile: bool = False
    clip_norm: NonNegative = 0.0
    clip_value: NonNegative = 0.0
    head_lr_scale: NonNegative = 1.0
    warmup_epochs: Natural = 0
    evaluate_every: Natural = 1
    checkpoint_every: Count = 1
    evaluate_batch: Natural = 0
    residence: Literal["auto", "device", "host", "stream"] = "auto"
    workers: Annotated[int, Range(0, 2**10)] = 2
    on_bad_picture: Literal["error", "skip"] = "error"
    logger: Literal["tensorboard", "csv", "wandb", "mlflow", "none"] = "tensorboard"

    @property
    def run_id(self) -> str:
        """Twelve characters that identify the settings.

        Settings of the execution, such as `device`, are not part of the id.
        """
        settings = {key: value for key, value in asdict(self).items() if key not in NO_RESULT and (key, value) not in _LATER.items()}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def test_metrics(self) -> list[str]:
        """Metrics of the validation and test classes."""
        return [text for part, text in map(split_metric, self.metrics) if part == "test"]

    @property
    def train_metrics(self) -> list[str]:
        """Metrics of the training images, without the prefix."""
        return [text for part, text in map(split_metric, self.metrics) if part == "train"]

    def dump(self) -> str:
        """Return all settings as TOML."""
        return "".join(f"{key} = {to_toml(value)}\n" for key, value in asdict(self).items())

    def first_difference(self, other: RunConfig, apart: str) -> str:
        """Return the first setting that differs, or nothing.

        `apart` and settings of the execution are not compared.
        """
        compared = (each.name for each in fields(self) if each.name not in NO_RESULT | {apart})
        return next((key for key in compared if getattr(self, key) != getattr(other, key)), "")


#: Settings of the execution and logging of a run, which do not change its results.
NO_RESULT = {"device", "strategy", "evaluate_batch", "residence", "workers", "logger", "checkpoint_every"}

#: Settings that were added later, with the value of older runs, so that their ids stay the same.
_LATER: dict[str, Any] = {"chosen_by": 1, "geometry": "", "watch_datasets": ()}

#: Settings that name a component, with the folder of its type.
PARTS = {
    "dataset": "datasets",
    "split": "splits",
    "transform": "transforms",
    "backbone": "backbones",
    "adapter": "adapters",
    "head": "heads",
    "objective": "objectives",
    "loss": "losses",
    "miner": "miners",
    "sampler": "samplers",
    "optimizer": "optimizers",
    "schedule": "schedules",
    "metrics": "metrics",
}

#: Components that a run may omit.
_MAY_BE_EMPTY = ("adapter", "miner")


def to_toml(value: Any) -> str:
    """Write a literal as TOML, which writes all but tables as JSON does."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{to_toml(str(key))} = {to_toml(each)}" for key, each in value.items() if each is not None) + "}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf, -inf, nan
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML allows this character only in this form


def load(path: str | Path | None = None, **overrides: Any) -> RunConfig:
    """Read and check the settings of a run from a TOML file, with some of them replaced.

    Args:
        path: TOML file, or name of a configuration of the package. Without one, the defaults are used.
        overrides: Settings by name, such as `seed=3`.

    Returns:
        The settings.

    >>> load(seed=3).seed
    3
    """
    settings = {} if path is None else read_toml(path, like='`key = "text"` or `key = 1`')
    return from_settings(settings | overrides, str(path) if path else "settings")


#: Configurations of the package: runs, and in `studies/` grids and searches.
CONFIGS = Path(__file__).parent / "configs"


def find_config(path: str | Path) -> Path:
    """Return the file of a configuration, which is given by path or by name.

    A name, such as `cub200_margin`, has neither a folder nor `.toml`, and belongs to a file of the package's `configs/`. A file
    of that name in the working directory comes first.

    Args:
        path: Path of a TOML file, or name of a configuration.
    """
    given = Path(path)
    if given.suffix == ".toml" or len(given.parts) != 1 or given.is_file():
        return given
    return shipped_configs().get(given.name, given)


def shipped_configs() -> dict[str, Path]:
    """Return the configuration files of the package by name: first runs, then studies."""
    return {file.stem: file for file in (*sorted(CONFIGS.glob("*.toml")), *sorted(CONFIGS.glob("studies/*.toml")))}


def _where(path: str | Path) -> str:
    """Return the hint for a file that does not exist."""
    name = Path(path).stem
    if name in shipped_configs():
        return f"write `{name}`: configurations of the package are found by name"
    near = closest(name, shipped_configs())
    return near if near.startswith("did you mean") else "`unimetric configs` lists configurations to start from"


def read_toml(path: str | Path, *, like: str) -> dict[str, Any]:
    """Read a TOML file without checking its keys.

    Args:
        path: TOML file, or name of a configuration of the package.
        like: Example of a line, for the hint if the file is not TOML.

    Returns:
        Content of the file.
    """
    try:
        return tomllib.loads(find_config(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UnimetricError(f"{path}: no such file", _where(path)) from None
    except IsADirectoryError:
        raise UnimetricError(f"{path} must be a file, got a folder", "name a .toml file in it") from None
    except OSError as error:
        raise UnimetricError(f"{path}: cannot be read: {error.strerror}", _where(path)) from None
    except (ValueError, RecursionError) as error:  # too many digits or too deep lists are not TOML errors
        raise UnimetricError(f"{path}: not TOML: {error}", f"write {like}, one per line") from None


def override(word: str) -> tuple[str, Any]:
    """Parse a setting of the command line: `seed=3`, `loss=margin(beta=0.6)`.

    >>> override("seed=3"), override("loss=margin(beta=0.6)")
    (('seed', 3), ('loss', 'margin(beta=0.6)'))
    """
    key, equals, text = word.partition("=")
    if not equals:
        raise UnimetricError(f"cannot read `{word}`", "write settings as `key=value`, such as `seed=3`")
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return key.strip(), text.strip()  # a string whose quotes the shell has removed
    except (ValueError, RecursionError) as error:  # too many digits or too deep lists
        raise UnimetricError(f"cannot read `{key.strip()}={text[:40]}...`: {error}", "write a shorter value") from None
    if len(found) > 1:
        raise UnimetricError(f"cannot read `{word}`: a setting must be one line", "write each setting as a separate word")
    return key.strip(), found["value"]


def split_specs(text: str, place: str) -> list[str]:
    """Split a list of spec strings: with semicolons between them, or a TOML list.

    Args:
        text: The list as typed on the command line.
        place: Name of the setting or option, for errors.

    Returns:
        The spec strings. Semicolons within quotes do not separate.

    >>> split_specs("recall(k=1); map_at_r", "metrics")
    ['recall(k=1)', 'map_at_r']
    >>> split_specs('["recall(k=1)", "map_at_r"]', "metrics")
    ['recall(k=1)', 'map_at_r']
    """
    if not text.lstrip().startswith("["):
        found = re.findall(r"""(?:'[^']*'|"[^"]*"|[^;])+""", text)
        return [spec.strip() for spec in found if spec.strip()]
    hint = """use `'recall(k=1); map_at_r'` or `'["recall(k=1)", "map_at_r"]'`, within quotes for the shell"""
    try:
        specs = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        raise UnimetricError(f"{place} must be a list of spec strings, got `{text}`", hint) from None
    if not isinstance(specs, list) or not all(isinstance(spec, str) for spec in specs):
        raise UnimetricError(f"{place} must be a list of spec strings, got `{text}`", hint)
    return specs


def split_metric(text: str) -> tuple[str, str]:
    """Split an entry of `metrics` into `test` or `train` and the metric's spec string.

    >>> split_metric("recall(k=1)"), split_metric("train: spectral_decay")
    (('test', 'recall(k=1)'), ('train', 'spectral_decay'))
    """
    part, colon, metric = text.partition(":")
    return ("train", metric.strip()) if colon and part.strip() == "train" else ("test", text)


def from_settings(settings: dict[str, Any], place: str = "settings") -> RunConfig:
    """Check settings and return them as a `RunConfig`. Errors start with `place`."""
    known = {field.name: field for field in fields(RunConfig)}
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in known:
            raise UnimetricError(f"{place}: unknown key `{key}`", closest(key, known))
        values[key] = _checked(key, value, known[key].default, place)
    config = RunConfig(**values)
    if config.chosen_by > len(config.metrics):
        raise UnimetricError(
            f"{place}: `chosen_by` is {config.chosen_by}, but there are {len(config.metrics)} metrics",
            "name more `metrics`, or choose by fewer",
        )
    # A fused optimizer unscales the gradient itself, after clipping.
    if config.precision == "16-mixed" and (config.clip_norm or config.clip_value):
        key = "clip_norm" if config.clip_norm else "clip_value"
        raise UnimetricError(f'{place}: `{key}` cannot clip with `precision = "16-mixed"`', 'use `precision = "bf16-mixed"`, or remove it')
    for key, kind in PARTS.items():
        for text in config.metrics if key == "metrics" else [getattr(config, key)]:
            if text or key not in _MAY_BE_EMPTY:
                check_part(kind, split_metric(text)[1] if key == "metrics" else text, place, key)
    for text in config.watch_datasets:
        check_part("datasets", text, place, "watch_datasets")
    _check_choice(config, place)
    return config


def from_backbone(text: str, settings: dict[str, Any], place: str, expected: str) -> RunConfig:
    """Return the settings of a backbone without a head.

    Args:
        text: Backbone spec string.
        settings: Settings that replace the defaults.
        place: Start of errors.
        expected: What else the text may be, for errors.
    """
    name = text.partition("(")[0]
    is_file = os.path.isfile(text) or os.sep in name or name.endswith((".index", ".pack"))
    if is_file or ("." not in name and name not in names("backbones")):
        raise UnimetricError(f"{text}: not a {expected} or backbone", closest(name, names("backbones")))
    if "backbone" in settings:
        raise UnimetricError(f"{place}: `backbone = {settings['backbone']!r}` would replace `{text}`", "remove `backbone`")
    return from_settings({"backbone": text, "head": "identity"} | settings, place)


def _check_choice(config: RunConfig, place: str) -> None:
    """Raise an error if the metric that selects the best epoch cannot do so.

    Structure metrics and metrics of the training images cannot.
    """
    for text in config.metrics[: config.chosen_by]:
        if split_metric(text)[0] == "train":
            raise UnimetricError(
                f"{place}: metrics: `{text}` is measured on the training images, which cannot select the best epoch",
                "put another metric before it, such as `recall(k=1)`",
            )
        with locating(f"{place}: metrics"):
            judges = better(text) != "neither"
        if not judges:
            raise UnimetricError(
                f"{place}: metrics: `{text}` is a structure metric, which cannot select the best epoch",
                "put another metric before it, such as `recall(k=1)`" + (", or lower `chosen_by`" if config.chosen_by > 1 else ""),
            )


def check_part(kind: str, text: str, place: str, key: str) -> None:
    """Check a spec string against the signature of its component.

    Run-provided arguments count as given.
    """
    with locating(f"{place}: {key}"):
        bind_arguments(kind, text, **OFFERED)


def better(text: str) -> str:
    """Return whether "higher" or "lower" values of a metric are better, or "neither".

    The attribute `better` of a metric defines it. A metric that computes another one, such as `per_source(metric=...)`, has the value
    of that one.

    Args:
        text: Metric spec string.

    >>> better("recall(k=1)"), better("per_source(metric='pi_ratio')")
    ('higher', 'neither')
    """
    name, arguments = parse(text).name, bind_arguments("metrics", text)
    if "." in name:
        from unimetric.foreign import declared  # loads torch, as third-party metrics do

        found = declared("metrics", find("metrics", name), "better")
    elif "metric" in arguments:
        return better(arguments["metric"])
    else:
        found = declaration("metrics", name).members.get("better", "higher")
    if found not in ("higher", "lower", "neither"):
        raise UnimetricError(
            f"`better` of `{text}` must be 'higher', 'lower' or 'neither', got {found!r}", "correct the attribute of the metric"
        )
    return found


def score(metrics: Sequence[str], line: dict[str, Any], part: str) -> float:
    """Return the score of an epoch: the sum of some metrics, negated if lower is better.

    A metric with several values counts with their mean. A score that is not finite is minus infinity.

    Args:
        metrics: Metrics that select the best epoch.
        line: Results by `PART/METRIC` or `PART/METRIC/KEY`.
        part: `validation` or `test`.

    Returns:
        The score; higher is better.
    """
    total = 0.0
    for text in metrics:
        numbers = [value for key, value in line.items() if key == f"{part}/{text}" or key.startswith(f"{part}/{text}/")]
        total += (-1 if better(text) == "lower" else 1) * sum(numbers) / max(1, len(numbers))
    return total if math.isfinite(total) else -math.inf


@functools.cache
def setting_types() -> dict[str, Any]:
    """Return the allowed values of each setting: its resolved annotation."""
    return get_type_hints(RunConfig, include_extras=True)


def _checked(key: str, value: Any, default: Any, place: str) -> Any:
    """Return a setting as `RunConfig` stores it, or raise an error that names `place`."""
    if isinstance(default, tuple) and isinstance(value, str):
        value = split_specs(value, f"{place}: `{key}`")
    allowed = setting_types()[key]
    problem = requirement(allowed, value)
    if problem:
        hint = suggestion(allowed, value) or f"the default is `{key} = {to_toml(default)}`"
        raise UnimetricError(f"{place}: `{key}` must be {problem}, got {value!r}", hint)
    value = type(default)(value)
    return value + 0.0 if isinstance(value, float) else value  # -0.0 is 0.0: equal runs have equal ids
