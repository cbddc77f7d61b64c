"""Type stubs of the folders of components, for editors and type checkers.

`make docs` writes them, and `make check` compares them.

    python -m unimetric.cli.stubs            # write src/unimetric/*/__init__.pyi
    python -m unimetric.cli.stubs --check    # exit code 1 if one of them is not up to date

A stub imports every public name of its folder, which `spec.catalogue` binds on first use.
"""

from __future__ import annotations

import sys
from pathlib import Path

from unimetric.files import write_text
from unimetric.spec import KINDS, components, open_folder


def stub(kind: str) -> str:
    """Return the text of a folder's stub: one import per public name.

    >>> "from unimetric.metrics.recall import recall as recall" in stub("metrics").splitlines()
    True
    """
    homes = {name: f"unimetric.{kind}.{file}" for file, name in components(kind).items()} | vars(open_folder(kind))["_further"]
    lines = [f"from {home} import {name} as {name}\n" for name, home in sorted(homes.items(), key=lambda item: (item[1], item[0]))]
    return f"# Names of `unimetric.{kind}`, written by `make docs`.\n" + "".join(lines)


def stub_path(kind: str) -> Path:
    """Return the path of a folder's stub."""
    return Path(__file__).parents[1] / kind / "__init__.pyi"


def outdated() -> list[Path]:
    """Return the stubs that are missing or differ from their folder."""
    paths = {kind: stub_path(kind) for kind in KINDS}
    return [path for kind, path in paths.items() if not path.exists() or path.read_text(encoding="utf-8") != stub(kind)]


def main(arguments: list[str]) -> int:
    """Write the stubs, or only compare them with `--check`. Returns the exit code."""
    if "--check" not in arguments:
        for kind in KINDS:
            write_text(stub_path(kind), stub(kind))
        return 0
    found = outdated()
    for path in found:
        print(f"{path}: not up to date; run `make docs`", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
