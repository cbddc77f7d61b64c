"""Commands that train: `train`, `check`, `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from unimetric.cli.options import Settings, read_overrides


def _load(config: str | None, settings: list[str] | None) -> Any:
    from unimetric.config import load

    words = list(settings or [])
    if config is not None and _is_setting(config):
        words, config = [config, *words], None
    return load(config, **read_overrides(words, train))


def _is_setting(word: str) -> bool:
    return "=" in word and not word.endswith(".toml")


def train(
    config: Annotated[
        str | None,
        typer.Argument(help="TOML file of a run, or the name of a config in the package (default: built-in settings).", show_default=False),
    ] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Run folder (default: `runs/<id>`). An unfinished run there is resumed.")] = None,
    quiet: Annotated[bool, typer.Option(help="Output of the result only.")] = False,
) -> None:
    """Train a model, or resume an interrupted run.

    Examples:

    - `unimetric train glyphs_margin`
    - `unimetric train cub200_margin seed=3 "loss=margin(beta=0.6)" --out runs/a`
    - `unimetric train dataset=cub200 "metrics=recall(k=1); map_at_r"`
    """
    from unimetric.training.loop import train as run

    run_config = _load(config, settings)
    folder = out or Path("runs") / run_config.run_id
    best = run(run_config, folder, quiet=quiet)
    print(f"best epoch {best['epoch']} (chosen on {best['chosen_on']}): {_numbers(best)}")
    for name, line in best.get("variants", {}).items():
        print(f"  {name}: best epoch {line['epoch']}: {_numbers(line)}")
    if best.get("raw"):
        print(f"raw backbone: {_numbers(best['raw'])}")
    print(f"see {folder}; compute more metrics with: unimetric evaluate {folder}")
    if best.get("warning"):
        print(f"warning: {best['warning']}")


def _numbers(line: dict[str, Any]) -> str:
    return "  ".join(f"{key} {value:.4f}" for key, value in line.items() if key.startswith(("validation/", "test/")))


def check(
    words: Annotated[
        list[str], typer.Argument(help="TOML files or names of configs, and settings as `key=value`.", metavar="CONFIG|KEY=VALUE")
    ],
    data: Annotated[bool, typer.Option(help="Reading of the datasets, too.")] = False,
) -> None:
    """Check the settings of runs and the fit of their components.

    Examples:

    - `unimetric check cub200_margin glyphs_losses`
    - `unimetric check --data cub200_margin seed=3`
    - `unimetric check dataset=cub200 "loss=margin(beta=0.6)"`
    """
    from unimetric.config import load
    from unimetric.runs.rows import read_table
    from unimetric.studies.grid import check_runs
    from unimetric.studies.ranges import is_grid, read_any
    from unimetric.training.build import check_fit

    files: list[str | None] = [word for word in words if not _is_setting(word)]
    overrides = read_overrides([word for word in words if _is_setting(word)], check, axes=bool(files))
    for path in files or [None]:
        if path is not None and is_grid(path):
            runs = read_any(path, **overrides)
            check_runs(runs, path)
            if data:
                for config in {(run.config.dataset, run.config.split): run.config for run in runs}.values():
                    read_table(config)
            print(f"{path}: good, {len(runs)} runs")
            continue
        config = load(path, **overrides)
        name = path or "settings"
        check_fit(config, name)
        if data:
            read_table(config)
        print(f"{name}: good, run {config.run_id}")


def demo(
    out: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/demo"),
) -> None:
    """Train on letters and test on new ones: two minutes, no download.

    Examples:

    - `unimetric demo`
    """
    from unimetric.training.demo import demo as run

    run(out)
