"""Compare configs and studies with the settings of the papers that they cite.

Run it with `python -m unimetric.studies.protocols`.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from inspect import Parameter
from pathlib import Path
from typing import Any

from unimetric.config import CONFIGS, PARTS, RunConfig
from unimetric.errors import UnimetricError, closest
from unimetric.spec import OFFERED, bind, signature
from unimetric.spec import parse as parse_text
from unimetric.studies.grid import Run
from unimetric.studies.ranges import read_any

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

    def applies(self, path: Path, run: Run) -> bool:
        """Return whether the entry is about this run."""
        if self.files and not any(fnmatchcase(path.name, pattern) for pattern in self.files):
            return False
        if not all(fnmatchcase(run.labels.get(axis, ""), pattern) for axis, pattern in self.labels.items()):
            return False
        return all(not differences(run.config, key, value) for key, value in self.when.items())


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


@dataclass(frozen=True)
class Deviation:
    """A setting that differs from the protocol.

    Args:
        path: Config or study.
        key: Setting or argument, such as `epochs` or `loss.or_count`.
        wanted: Value of the protocol.
        found: Value of the run.
        why: Reason of the protocol.
        run: Label of the first run that deviates.
    """

    path: Path
    key: str
    wanted: str
    found: str
    why: str
    run: str

    def __str__(self) -> str:
        where = f"{self.path}: {self.run}" if self.run else str(self.path)
        return f"{where}: `{self.key}` must be {self.wanted}, got {self.found} ({self.why})"


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


def wanted_settings(protocol: Protocol, path: Path, run: Run) -> dict[str, tuple[Any, str]]:
    """Return the value and the reason that a protocol has for each key of a run.

    A component replaces all earlier arguments of its setting; a key such as `loss.beta` replaces one argument.
    """
    wanted: dict[str, tuple[Any, str]] = {}
    for entry in protocol.entries:
        if not entry.applies(path, run):
            continue
        entry.used = True
        replaced = {*entry.set, *entry.skip}
        wanted = {key: each for key, each in wanted.items() if key not in replaced and key.partition(".")[0] not in replaced}
        for key, value in entry.set.items():
            wanted |= {each: (part, entry.why) for each, part in _by_argument(key, value).items()}
    return wanted


def _by_argument(key: str, value: Any) -> dict[str, Any]:
    """Separate a component into its name and its arguments."""
    if key not in PARTS or not isinstance(value, str) or not value:
        return {key: value}
    call = parse(value)
    return {key: call.name} | {f"{key}.{argument}": each for argument, each in call.named.items()}


def deviations(path: Path, protocols: Iterable[Protocol]) -> Iterator[Deviation]:
    """Yield the settings of a config or study that differ from the papers in its header."""
    header = "".join(line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.startswith("#"))
    cited = [protocol for protocol in protocols if any(text in header for text in protocol.cited)]
    if not cited:
        return
    seen = set()
    for run in _distinct(read_any(path)):
        for protocol in cited:
            other: set[str] = set()  # settings with another component, whose arguments cannot be compared
            for key, (value, why) in wanted_settings(protocol, path, run).items():
                if key.partition(".")[0] in other:
                    continue
                for each, (wanted, found) in differences(run.config, key, value).items():
                    other |= {key} & PARTS.keys()
                    if (each, wanted, found) not in seen:
                        seen.add((each, wanted, found))
                        yield Deviation(path, each, wanted, found, f"{protocol.name}: {why}", ", ".join(run.labels.values()))


def _distinct(runs: list[Run]) -> list[Run]:
    """Keep one run of those that differ in seed and split alone, which no protocol fixes."""
    found: dict[tuple[RunConfig, str], Run] = {}
    for run in runs:
        labels = [label for axis, label in run.labels.items() if axis not in ("seed", "split")]
        found.setdefault((replace(run.config, seed=0, split="standard"), ", ".join(labels)), run)
    return list(found.values())


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
        return {} if _canonical(value) == _canonical(wanted) else {key: (repr(wanted), repr(value))}
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
    return _arguments(PARTS[setting], value).get(argument, "no such argument") if value else "no component"


@cache
def _arguments(kind: str, text: str) -> dict[str, Any]:
    """Return all arguments of a component, written or default."""
    part, _ = bind(kind, text, **OFFERED)
    defaults = {key: each.default for key, each in signature(part).parameters.items() if each.default is not Parameter.empty}
    return defaults | parse(text).named


def _canonical(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_canonical, value))
    if isinstance(value, str) and value.endswith(")"):
        call = parse(value)
        return call.name, sorted((key, _canonical(each)) for key, each in call.named.items())
    return value


def check(paths: Iterable[Path], *, complete: bool = False) -> list[str]:
    """Return one line per deviation.

    Args:
        paths: Configs and studies.
        complete: Whether these are all files, so that an entry that applies to none of them is an error.
    """
    protocols = read_protocols()
    lines = [str(each) for path in paths for each in deviations(path, protocols)]
    if complete:
        unused = [entry.name for protocol in protocols for entry in protocol.entries if not entry.used]
        lines += [f"{PROTOCOLS.name}: {name} applies to no run: correct or remove it" for name in unused]
    return lines


def main(arguments: list[str]) -> int:
    """Check the named files, or all of `configs/` without arguments."""
    paths = [Path(each) for each in arguments] or sorted([*CONFIGS.glob("*.toml"), *CONFIGS.glob("studies/*.toml")])
    try:
        if not paths:
            raise UnimetricError("no configs found in `configs/`", "run this in the repository, or name files")
        lines = check(paths, complete=not arguments)
    except UnimetricError as error:
        lines = [str(error)]
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    if not lines:
        print(f"{len(paths)} files agree with the protocols of the papers that they cite")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
