"""Compare configs and studies with the settings of the papers that they cite.

Run it with `python -m unimetric.studies.protocols`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from unimetric.config import RunConfig, shipped_configs
from unimetric.errors import UnimetricError
from unimetric.report.protocols import PROTOCOLS, Protocol, compare, read_protocols, wanted_settings
from unimetric.studies.grid import Run
from unimetric.studies.ranges import read_any


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


def deviations(path: Path, protocols: Iterable[Protocol]) -> Iterator[Deviation]:
    """Yield the settings of a config or study that differ from the papers in its header."""
    header = "".join(line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.startswith("#"))
    cited = [protocol for protocol in protocols if any(text in header for text in protocol.cited)]
    if not cited:
        return
    seen = set()
    for run in _distinct(read_any(path)):
        for protocol in cited:
            settings = wanted_settings(protocol, run.config, file=path.name, labels=run.labels)
            for key, each, wanted, found in compare(run.config, {key: value for key, (value, _) in settings.items()}):
                if (each, wanted, found) not in seen:
                    seen.add((each, wanted, found))
                    yield Deviation(path, each, wanted, found, f"{protocol.name}: {settings[key][1]}", ", ".join(run.labels.values()))


def _distinct(runs: list[Run]) -> list[Run]:
    """Keep one run of those that differ in seed and split alone, which no protocol fixes."""
    found: dict[tuple[RunConfig, str], Run] = {}
    for run in runs:
        labels = [label for axis, label in run.labels.items() if axis not in ("seed", "split")]
        found.setdefault((replace(run.config, seed=0, split="standard"), ", ".join(labels)), run)
    return list(found.values())


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
    paths = [Path(each) for each in arguments] or list(shipped_configs().values())
    try:
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
