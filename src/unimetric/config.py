"""A run as one flat table of settings: the same text in the file, on the command line, in a grid and in the report. No torch here."""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from unimetric.errors import UnimetricError, closest
from unimetric.spec import OFFERED, bind, create, parse


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides what a run does. A field that names a part is the singular of that part's folder.

    Args:
        dataset: pictures and labels; a part of `datasets/`.
        split: which rows train and which test; a part of `splits/`.
        transform: how pictures are cropped and coloured; a part of `transforms/`.
        backbone: pictures to tokens; a part of `backbones/`.
        adapter: what is inserted into a frozen backbone; a part of `adapters/`, or empty to train the backbone itself.
        head: tokens to the embedding; a part of `heads/`.
        objective: what is minimised; a part of `objectives/`.
        loss: a part of `losses/`.
        miner: a part of `miners/`; empty for the loss's own.
        sampler: how batches are drawn; a part of `samplers/`.
        optimizer: a part of `optimizers/`.
        schedule: a part of `schedules/`.
        metrics: what is measured on the test classes; parts of `metrics/`. The first one chooses the best epoch, so that it must judge a
            space and not only describe it.
        chosen_by: how many of the first metrics choose the best epoch, by their sum: 2 for recall@1 + mAP@1000, as ooDML does. One where
            lower is better counts with a minus.
        geometry: geometry in which embeddings are compared in evaluation: `cosine`, `euclidean` (L2 distance of raw embeddings), `inner`
            (inner product of raw embeddings) or `poincare` (only for a loss with a curvature). Empty for the loss's own.
        epochs: passes over the training pictures.
        batch_size: pictures a step, over all devices together.
        seed: of everything that is random.
        precision: Lightning Fabric's word, such as `32-true` or `bf16-mixed`; `auto` is bf16 on a GPU and float32 elsewhere.
        device: `auto`, `cpu`, `cuda`; a number of devices after a colon: `cuda:4`.
        strategy: Lightning Fabric's word for several devices.
        compile: compile the model and the objective with torch.compile.
        clip_norm: largest norm of the gradient; 0 leaves it alone.
        clip_value: largest entry of the gradient; 0 leaves it alone.
        head_lr_scale: the head's learning rate as a multiple of the backbone's.
        warmup_epochs: epochs at the start that train only the head and the loss.
        evaluate_every: epochs between evaluations; 0 evaluates at the end only.
        checkpoint_every: epochs between checkpoints.
        evaluate_batch: pictures at once when measuring.
        residence: where packed pictures wait: `device`, `host`, `stream` (decoded as they come), or `auto`.
        workers: processes that decode pictures when they are streamed.
        on_bad_picture: `error` stops at a picture that cannot be read; `skip` leaves it out and lists it.
        logger: `tensorboard`, `csv`, `wandb`, `mlflow` or `none`.
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
    metrics: tuple[str, ...] = ("recall(k=1)",)
    chosen_by: int = 1
    geometry: str = ""
    epochs: int = 10
    batch_size: int = 112
    seed: int = 0
    precision: str = "auto"
    device: str = "auto"
    strategy: str = "auto"
    compile: bool = False
    clip_norm: float = 0.0
    clip_value: float = 0.0
    head_lr_scale: float = 1.0
    warmup_epochs: int = 0
    evaluate_every: int = 1
    checkpoint_every: int = 1
    evaluate_batch: int = 256
    residence: str = "auto"
    workers: int = 2
    on_bad_picture: str = "error"
    logger: str = "tensorboard"

    @property
    def run_id(self) -> str:
        """Twelve letters that stand for the settings: equal runs have equal ids. How a run is carried out does not count."""
        settings = {key: value for key, value in asdict(self).items() if key not in NO_RESULT and (key, value) not in _LATER.items()}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]

    def dump(self) -> str:
        """The settings as TOML, every one of them."""
        return "".join(f"{key} = {_toml(value)}\n" for key, value in asdict(self).items())


#: Settings that change how a run is carried out or watched, and not what it computes.
NO_RESULT = {"device", "strategy", "evaluate_batch", "residence", "workers", "logger", "checkpoint_every"}

#: Settings that came later, and what runs before them had: so that theirs keep their ids.
_LATER = {"chosen_by": 1, "geometry": ""}

#: Fields that name a part, and its folder.
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

#: Parts that a run can do without.
_MAY_BE_EMPTY = ("adapter", "miner")

_CHOICES = {
    "geometry": ("", "cosine", "euclidean", "inner", "poincare"),
    "residence": ("auto", "device", "host", "stream"),
    "on_bad_picture": ("error", "skip"),
    "logger": ("tensorboard", "csv", "wandb", "mlflow", "none"),
}

_LEAST = {
    "chosen_by": 1,
    "epochs": 1,
    "batch_size": 2,
    "seed": 0,
    "clip_norm": 0,
    "clip_value": 0,
    "head_lr_scale": 0,
    "warmup_epochs": 0,
    "evaluate_every": 0,
    "checkpoint_every": 1,
    "evaluate_batch": 1,
    "workers": 0,
}

#: Every generator of random numbers takes a seed up to there; a batch is compared with itself, and a worker is a process.
_MOST = {"seed": 2**32 - 1, "batch_size": 2**20, "workers": 2**10}


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)  # a TOML string, number or boolean is written as JSON's


def load(path: str | Path | None = None, **overrides: Any) -> RunConfig:
    """Read a run's settings from a TOML file, with some of them replaced; checked before anything is loaded.

    Args:
        path: a TOML file; without one, the defaults.
        overrides: settings by name, such as `seed=3`.

    >>> load(seed=3).seed
    3
    """
    settings: dict[str, Any] = {}
    place = str(path) if path else "settings"
    if path is not None:
        settings = read_toml(path, examples="`unimetric/configs/` for runs", like='`key = "text"` or `key = 1`')
    return from_settings(settings | overrides, place)


#: Configurations that are part of the package: runs, and grids and searches in `studies/`.
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
    return _shipped().get(given.name, given)


def _shipped() -> dict[str, Path]:
    """All configurations of the package, by name."""
    return {file.stem: file for file in (*CONFIGS.glob("*.toml"), *CONFIGS.glob("studies/*.toml"))}


def _where(path: str | Path, examples: str) -> str:
    """The hint for a file that does not exist."""
    name = Path(path).stem
    if name in _shipped():
        return f"write `{name}`: the configurations are part of the package, and found by name"
    near = closest(name, _shipped())
    return near if near.startswith("did you mean") else f"see {examples} to start from"


def read_toml(path: str | Path, *, examples: str, like: str) -> dict[str, Any]:
    """A TOML file as it is written.

    Args:
        path: the file.
        examples: where there are some to start from, and of what, for the hint where there is no such file.
        like: how a line is written, for the hint where it is not TOML.
    """
    try:
        return tomllib.loads(find_config(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UnimetricError(f"{path}: no such file", _where(path, examples)) from None
    except IsADirectoryError:
        raise UnimetricError(f"{path} is a folder", "name a .toml file in it") from None
    except OSError as error:
        raise UnimetricError(f"{path}: cannot be read: {error.strerror}", f"see {examples} to start from") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, or lists in lists in lists, is no error of TOML's own
        raise UnimetricError(f"{path}: not TOML: {error}", f"write {like}, one to a line") from None


def override(word: str) -> tuple[str, Any]:
    """A setting as typed on the command line: `seed=3`, `loss=margin(beta=0.6)`.

    >>> override("seed=3"), override("loss=margin(beta=0.6)")
    (('seed', 3), ('loss', 'margin(beta=0.6)'))
    """
    key, equals, text = word.partition("=")
    if not equals:
        raise UnimetricError(f"cannot read `{word}`", "write settings as `key=value`, such as `seed=3`")
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return key.strip(), text.strip()  # the shell has taken the quotes of a string
    except (ValueError, RecursionError) as error:  # a number of too many digits, or lists in lists in lists
        raise UnimetricError(f"cannot read `{key.strip()}={text[:40]}...`: {error}", "write a shorter value") from None
    if len(found) > 1:
        raise UnimetricError(f"cannot read `{word}`: it has several lines", "write each setting as a word of its own")
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


def from_settings(settings: dict[str, Any], place: str = "settings") -> RunConfig:
    """Check a dictionary of settings and make a `RunConfig` of it. Errors name `place`."""
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
    if config.precision == "16-mixed" and (config.clip_norm or config.clip_value):  # a fused optimiser scales the gradient back by itself
        key = "clip_norm" if config.clip_norm else "clip_value"
        raise UnimetricError(
            f'{place}: `{key}` cannot clip with `precision = "16-mixed"`', 'write `precision = "bf16-mixed"`, or leave it out'
        )
    for key, kind in PARTS.items():
        for text in config.metrics if key == "metrics" else [getattr(config, key)]:
            if text or key not in _MAY_BE_EMPTY:
                check_part(kind, text, place, key)
    _check_choice(config, place)
    return config


def _check_choice(config: RunConfig, place: str) -> None:
    """See that every metric that chooses the best epoch knows which of two epochs is better."""
    for text in config.metrics[: config.chosen_by]:
        try:
            judges = better(text) != "neither"
        except UnimetricError as error:
            raise UnimetricError(f"{place}: metrics: {error.message}", error.hint) from None
        if not judges:
            raise UnimetricError(
                f"{place}: metrics: `{text}` describes a space without judging it, so that it cannot choose the best epoch",
                "write one that judges before it, such as `recall(k=1)`" + (", or lower `chosen_by`" if config.chosen_by > 1 else ""),
            )


def check_part(kind: str, text: str, place: str, key: str) -> None:
    """Read a part's text against its signature; what only a run can offer counts as given."""
    try:
        bind(kind, text, **OFFERED)
        if kind == "transforms" and "." not in parse(text).name:  # ours give data: one is built for nothing, and judges its sizes
            create(kind, text)
    except UnimetricError as error:
        raise UnimetricError(f"{place}: {key}: {error.message}", error.hint) from None


def better(text: str) -> str:
    """Which numbers of a metric are the better ones: "higher", "lower", or "neither" if it describes a space without judging it.

    A metric says so by its attribute `better`; what ours measure by another metric, such as `per_source(metric=...)`, is as that one is.

    Args:
        text: the metric, as `metrics` names it.

    >>> better("recall(k=1)"), better("per_source(metric='pi_ratio')")
    ('higher', 'neither')
    """
    part, arguments = bind("metrics", text)
    if "metric" in arguments and "." not in parse(text).name:
        return better(arguments["metric"])
    found = getattr(part, "better", "higher")
    if found not in ("higher", "lower", "neither"):
        raise UnimetricError(f"`{text}` says `better = {found!r}`", "let it say 'higher', 'lower' or 'neither'")
    return found


def score(metrics: Sequence[str], line: dict[str, Any], part: str) -> float:
    """How good an epoch is, the higher the better: the sum of some metrics, those where lower is better with a minus.

    Of a metric that gives several numbers it is their mean that counts; what is not finite is worse than anything.

    Args:
        metrics: those that choose.
        line: what was measured, by `PART/METRIC` or `PART/METRIC/KEY`.
        part: `validation` or `test`.
    """
    total = 0.0
    for text in metrics:
        numbers = [value for key, value in line.items() if key == f"{part}/{text}" or key.startswith(f"{part}/{text}/")]
        total += (-1 if better(text) == "lower" else 1) * sum(numbers) / max(1, len(numbers))
    return total if math.isfinite(total) else -math.inf


def _checked(key: str, value: Any, default: Any, place: str) -> Any:
    assert default is not MISSING
    kind = type(default)
    if kind is tuple:
        if isinstance(value, str):
            value = split_specs(value, f"{place}: `{key}`")
        value = tuple(value) if isinstance(value, list | tuple) else value
        good = isinstance(value, tuple) and all(isinstance(item, str) for item in value) and len(value) > 0
    elif kind is float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        value = float(value) + 0.0 if good else value  # minus nothing is nothing: runs that are equal have one id
    else:
        good = type(value) is kind
    if not good:
        raise UnimetricError(f"{place}: `{key}` must be {_WORDS[kind]}, not {value!r}", f"the default is {_toml(default)}")
    if key in _CHOICES and value not in _CHOICES[key]:
        raise UnimetricError(
            f"{place}: `{key}` cannot be {value!r}", "choose from: " + ", ".join(choice or '""' for choice in _CHOICES[key])
        )
    if key in _LEAST and value < _LEAST[key]:
        raise UnimetricError(f"{place}: `{key}` must be at least {_LEAST[key]}, not {value}", f"the default is {_toml(default)}")
    if key in _MOST and value > _MOST[key]:
        raise UnimetricError(f"{place}: `{key}` must be at most {_MOST[key]}, not {value}", f"the default is {_toml(default)}")
    return value


_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", tuple: "a list of texts"}
