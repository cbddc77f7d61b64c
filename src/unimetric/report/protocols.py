"""Settings of the papers (`protocols.toml`), and how those of a run differ from them.

No component is imported.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cache
from inspect import Parameter
from pathlib import Path
from typing import Any

from unimetric.config import PARTS, RunConfig
from unimetric.errors import UnimetricError, closest
from unimetric.spec import declaration
from unimetric.spec import parse as parse_text

PROTOCOLS = Path(__file__).parents[1] / "protocols.toml"
parse = cache(parse_text)
SETTINGS = {each.name for each in fields(RunConfig)}


@dataclass
class Entry:
    """One rule or exception of a protocol.

    Args:
        name: Name in messages, such as `oodml.rule 3`.
        why: Reason or reference.
        set: Wanted values by key.
        when: Settings that a run must have for the entry to apply.
        files: Shell patterns of file names. Empty means every file that cites the paper.
        labels: Shell patterns of a study's labels, by axis.
        skip: Keys that are not checked.
        used: Whether the entry has applied to a run.
    """

    name: str
    why: str
    set: dict[str, Any] = field(default_factory=dict)
    when: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    skip: list[str] = field(default_factory=list)
    used: bool = False

    def applies(self, config: RunConfig, file: str, labels: Mapping[str, str]) -> bool:
        """Return whether the entry is about a run.

        Args:
            config: Settings of the run.
            file: Name of its config or study. Empty for a run alone, to which no exception applies.
            labels: Labels of the run in its study.
        """
        if self.files and not any(fnmatchcase(file, pattern) for pattern in self.files):
            return False
        if not all(fnmatchcase(labels.get(axis, ""), pattern) for axis, pattern in self.labels.items()):
            return False
        return all(not differences(config, key, value) for key, value in self.when.items())


@dataclass(frozen=True)
class Protocol:
    """The settings of one paper.

    Args:
        name: Short name, such as `oodml`.
        cited: Texts by which a header cites the paper.
        entries: Rules, then exceptions. A later entry replaces the values of an earlier one.
    """

    name: str
    cited: list[str]
    entries: list[Entry]


def read_protocols(path: Path = PROTOCOLS) -> list[Protocol]:
    """Read the protocols and reject keys that are not settings."""
    found = []
    for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
        rules = [_entry(f"{name}.rule {number}", row) for number, row in enumerate(table["rule"], 1)]
        exceptions = [_entry(f"{name}.exception {number}", row) for number, row in enumerate(table["exception"], 1)]
        found.append(Protocol(name, table["cited"], rules + exceptions))
    return found


def _entry(name: str, row: dict[str, Any]) -> Entry:
    try:
        entry = Entry(name=name, **row)
    except TypeError as error:
        raise UnimetricError(f"{PROTOCOLS.name}: {name}: {error}", "write `why`, `set`, `when`, `files`, `labels` and `skip`") from None
    if ".exception" in name and not entry.files:
        raise UnimetricError(f"{PROTOCOLS.name}: {name} names no `files`", "name the files, or make it a rule")
    for key in (*entry.set, *entry.when, *entry.skip):
        setting = key.partition(".")[0]
        if setting not in SETTINGS:
            raise UnimetricError(f"{PROTOCOLS.name}: {name}: no setting `{setting}`", closest(setting, SETTINGS))
    return entry


def wanted_settings(
    protocol: Protocol, config: RunConfig, *, file: str = "", labels: Mapping[str, str] | None = None
) -> dict[str, tuple[Any, str]]:
    """Return the value and the reason that a protocol has for each key of a run.

    A component replaces all earlier arguments of its setting; a key such as `loss.beta` replaces one argument.

    Args:
        protocol: Settings of a paper.
        config: Settings of the run.
        file: Name of its config or study. Without it, exceptions do not apply.
        labels: Labels of the run in its study.
    """
    wanted: dict[str, tuple[Any, str]] = {}
    for entry in protocol.entries:
        if not entry.applies(config, file, labels or {}):
            continue
        entry.used = True
        replaced = {*entry.set, *entry.skip}
        wanted = {key: each for key, each in wanted.items() if key not in replaced and key.partition(".")[0] not in replaced}
        for key, value in entry.set.items():
            wanted |= {each: (part, entry.why) for each, part in by_argument(key, value).items()}
    return wanted


def by_argument(key: str, value: Any) -> dict[str, Any]:
    """Separate a component into its name and its written arguments.

    >>> by_argument("loss", "margin(beta=1.2)"), by_argument("epochs", 150)
    ({'loss': 'margin', 'loss.beta': 1.2}, {'epochs': 150})
    """
    if key not in PARTS or not isinstance(value, str) or not value:
        return {key: value}
    call = parse(value)
    return {key: call.name} | {f"{key}.{argument}": each for argument, each in call.named.items()}


def compare(config: RunConfig, wanted: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the settings of a run that differ from wanted values.

    Args:
        config: Settings of the run.
        wanted: Values by key, with the name of a component before its arguments.

    Returns:
        An iterator of key of `wanted`, key of the difference, wanted value, and found value.
    """
    other: set[str] = set()  # settings with another component, whose arguments cannot be compared
    for key, value in wanted.items():
        if key.partition(".")[0] in other:
            continue
        for each, (expected, found) in differences(config, key, value).items():
            other |= {key} & PARTS.keys()
            yield key, each, expected, found


def differences(config: RunConfig, key: str, wanted: Any) -> dict[str, tuple[str, str]]:
    """Compare one key of a run with a wanted value.

    Args:
        config: Settings of the run.
        key: Setting or argument, such as `epochs` or `loss.or_count`.
        wanted: A value; a component, of which only the written arguments are compared; or `{any = [...]}`.

    Returns:
        Wanted and found value by key; empty if they agree.
    """
    if isinstance(wanted, dict):
        each = [differences(config, key, value) for value in wanted["any"]]
        return {} if {} in each else {key: (" or ".join(map(repr, wanted["any"])), repr(_found(config, key)))}
    setting, _, argument = key.partition(".")
    if setting not in PARTS or argument or not wanted:
        value = _found(config, key)
        return {} if canonical(value) == canonical(wanted) else {key: (repr(wanted), repr(value))}
    text = getattr(config, setting)
    call = parse(wanted)
    if not text or parse(text).name != call.name:
        return {setting: (repr(wanted), repr(text))}
    found: dict[str, tuple[str, str]] = {}
    for name, value in call.named.items():
        found |= differences(config, f"{setting}.{name}", value)
    return found


def _found(config: RunConfig, key: str) -> Any:
    setting, _, argument = key.partition(".")
    value = getattr(config, setting)
    if not argument:
        return value
    return all_arguments(PARTS[setting], value).get(argument, "no such argument") if value else "no component"


@cache
def all_arguments(kind: str, text: str) -> dict[str, Any]:
    """Return all arguments of a component, written or default.

    Args:
        kind: Folder of the component.
        text: Spec string.
    """
    call = parse(text)
    if "." in call.name:  # reading the defaults of a third-party component would import it
        return call.named
    parameters = declaration(kind, call.name).parameters
    configured = declaration(kind, call.name).configured
    defaults = {key: each.default for key, each in parameters.items() if each.default is not Parameter.empty}
    return defaults | dict(zip(configured, call.positional, strict=False)) | call.named


def canonical(value: Any) -> Any:
    """Return a value in a form in which equal ones compare as equal.

    Lists equal tuples, and the order of arguments does not matter.
    """
    if isinstance(value, list | tuple):
        return tuple(map(canonical, value))
    if isinstance(value, str) and value.endswith(")"):
        call = parse(value)
        return call.name, sorted((key, canonical(each)) for key, each in call.named.items())
    return value
