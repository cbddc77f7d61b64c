"""Commands that train: `train`, `check`, `demo`."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unimetric.cli.imports import importing
from unimetric.cli.options import Settings, read_overrides
from unimetric.errors import Interrupted, UnimetricError

if TYPE_CHECKING:
    from unimetric.studies.grid import Run


def _load(config: str | None, settings: list[str] | None, *, quiet: bool = False) -> Any:
    """Return the settings of a run: of a config, of a folder of images, or of the demo."""
    from unimetric.config import load, shipped_configs

    words = list(settings or [])
    if config is not None and _is_setting(config):
        words, config = [config, *words], None
    overrides = read_overrides(words, train)
    if config is None and "dataset" not in overrides:
        from unimetric.training.demo import SETTINGS

        if not quiet:
            print("no dataset is given, so the settings are those of `unimetric demo`")
        return load(**SETTINGS | overrides)
    if config is not None and config not in shipped_configs() and Path(config).is_dir():
        if "dataset" in overrides:
            raise UnimetricError(f"{config}: is a folder of images, and `dataset` names other images", "leave out one of them")
        return _choose(config, overrides, quiet=quiet)
    if config is not None and "/" in config and not config.endswith(".toml") and not Path(config).exists():
        raise UnimetricError(f"{config}: no such folder", "name a folder with one subfolder of images per class, or a .toml file")
    if config is not None and config.endswith((".pack", ".csv")):
        call = f"pack(path={config!r})" if config.endswith(".pack") else f"csv(file={config!r})"
        raise UnimetricError(f"{config}: is a dataset, not a .toml file", f'write `unimetric train laptop "dataset={call}"`')
    return load(config, **overrides)


def _choose(root: str, overrides: dict[str, Any], *, quiet: bool) -> Any:
    """Choose the settings for a folder of images, and print them as a config file."""
    from unimetric.runs.choices import choose_settings, differing_settings

    run_config, notes = choose_settings(root, overrides)
    if not quiet:
        print("\n".join(notes))
        print(f"\nthe same settings as a config file, to be changed and passed to `unimetric train`:\n\n{differing_settings(run_config)}")
    return run_config


def _is_setting(word: str) -> bool:
    key, equals, _ = word.partition("=")
    # `os.path.isdir` accepts words that are too long for a path.
    return bool(equals) and not word.endswith(".toml") and (key.isidentifier() or not os.path.isdir(word))


def train(
    config: Annotated[
        str | None,
        typer.Argument(
            help="Folder of images, TOML file of a run, or name of a config in the package (default: the demo).", show_default=False
        ),
    ] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Run folder (default: `runs/<id>`). An unfinished run there is resumed.")] = None,
    quiet: Annotated[bool, typer.Option(help="Output of the result only.")] = False,
) -> None:
    """Train a model, or resume an interrupted run.

    Examples:

    - `unimetric train images/`
    - `unimetric train glyphs_margin`
    - `unimetric train cub200_margin seed=3 "loss=margin(beta=0.6)" --out runs/a`
    - `unimetric train dataset=cub200 "metrics=recall(k=1); map_at_r"`
    """
    with importing():
        from unimetric.training.loop import train as run
        from unimetric.training.scores import format_gain

    # The processes of further devices have the same command.
    run_config = _load(config, settings, quiet=quiet or os.environ.get("LOCAL_RANK", "0") != "0")
    folder = out or Path("runs") / run_config.run_id
    try:
        best = run(run_config, folder, quiet=quiet)
    except Interrupted:
        if _is_first_rank():
            raise
        raise typer.Exit(130) from None
    if not _is_first_rank():
        return
    print(f"best epoch {best['epoch']} (chosen on {best['chosen_on']}): {_numbers(best)}")
    for name, line in best.get("variants", {}).items():
        print(f"  {name}: best epoch {line['epoch']}: {_numbers(line)}")
    if best.get("raw"):
        print(f"raw backbone: {_numbers(best['raw'])}")
    for name, gain in best.get("gain", {}).items():
        print(f"gain over the untrained network on {name}: {format_gain(gain)}")
    print(f"see {folder}; compute more metrics with: unimetric evaluate {quote(str(folder))}")
    if best.get("warning"):
        print(f"warning: {best['warning']}")


def _is_first_rank() -> bool:
    """Return whether this process is the one of a run on several devices that prints."""
    from torch import distributed

    return not distributed.is_initialized() or distributed.get_rank() == 0


def _numbers(line: dict[str, Any]) -> str:
    return "  ".join(f"{key} {value:.4f}" for key, value in line.items() if key.startswith(("validation/", "test/")))


def check(
    words: Annotated[
        list[str], typer.Argument(help="TOML files or names of configs, and settings as `key=value`.", metavar="CONFIG|KEY=VALUE")
    ],
    data: Annotated[bool, typer.Option(help="Reading of the datasets, too.")] = False,
    build: Annotated[bool, typer.Option("--build", help="Building of every network, loss and sampler, too. Loads torch.")] = False,
) -> None:
    """Check the settings of runs and the fit of their components.

    Names, arguments, ranges and the conditions between components are checked from their source, in less than a second.
    `train` and `bench` build everything, as `--build` does, before an image is read.

    Examples:

    - `unimetric check cub200_margin glyphs_losses`
    - `unimetric check --build --data cub200_margin seed=3`
    - `unimetric check dataset=cub200 "loss=margin(beta=0.6)"`
    """
    from unimetric.config import RunConfig, load
    from unimetric.studies.grid import Run, check_runs
    from unimetric.studies.ranges import is_grid, read_any

    files: list[str | None] = [word for word in words if not _is_setting(word)]
    overrides = read_overrides([word for word in words if _is_setting(word)], check, axes=bool(files))
    seen: set[RunConfig] = set()
    for path in files or [None]:
        several = path is not None and is_grid(path)
        runs = read_any(path, **overrides) if path is not None and several else [Run(load(path, **overrides), {})]
        check_runs(runs, path or "settings", build=build and several, seen=seen)
        if build and not several:
            from unimetric.training.build import check_fit

            check_fit(runs[0].config, path or "settings")
        if data:
            _read_datasets(runs)
        print(f"{path or 'settings'}: good, {f'{len(runs)} runs' if several else f'run {runs[0].config.run_id}'}")


def _read_datasets(runs: list[Run]) -> None:
    """Read the dataset and the split of each run once."""
    from unimetric.runs.rows import read_table

    for config in {(run.config.dataset, run.config.split): run.config for run in runs}.values():
        read_table(config)


def demo(
    out: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/demo"),
) -> None:
    """Train on letters and test on new ones: two minutes, no download.

    Examples:

    - `unimetric demo`
    """
    with importing():
        from unimetric.training.demo import demo as run

    run(out)
