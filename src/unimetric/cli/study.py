"""Commands for many runs: `bench`, `tune`, `report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from unimetric.cli.options import Settings, read_overrides
from unimetric.errors import UnimetricError


def bench(
    grid: Annotated[Path, typer.Argument(help="A grid: a run's TOML file with lists for some settings.")],
    settings: Settings = None,
    out: Annotated[str, typer.Option(help="Where run folders go; default `runs/<grid>`. With --ray, any place of fsspec.")] = "",
    ray: Annotated[str, typer.Option(help="Run on the Ray cluster at this address; `auto` finds it, `local` starts one.")] = "",
    gpus: Annotated[float, typer.Option(help="With --ray: GPUs per run; 0.5 puts two runs on one.", min=0)] = 0.0,
    cpus: Annotated[float, typer.Option(help="With --ray: cores per run.", min=0)] = 1.0,
    parallel: Annotated[str, typer.Option(help="Number of runs at once on this machine, or `auto`: as many as fit in its memory.")] = "1",
    pictures: Annotated[bool, typer.Option(help="Keep what a report shows of each embedding.")] = True,
    quiet: Annotated[bool, typer.Option(help="Show nothing.")] = False,
) -> None:
    """Run every combination of a grid, or resume an interrupted study.

    Finished runs are skipped. A run that fails is tried twice and does not stop the others.

    Examples:

    - `unimetric bench glyphs_losses`
    - `unimetric bench glyphs_losses --parallel auto`
    - `unimetric bench revisiting_table2_cub200 "dataset=pack(path='cub.pack')" --ray auto --gpus 0.5`
    """
    from unimetric.studies.cluster import study_on_ray
    from unimetric.studies.grid import check_runs, read_grid
    from unimetric.studies.local import study
    from unimetric.studies.parallel import read_parallel

    runs = read_grid(grid, **read_overrides(settings, bench, axes=True))
    at_once = read_parallel(parallel)
    if not ray and (gpus != 0.0 or cpus != 1.0):
        raise UnimetricError("`--gpus` and `--cpus` are shares of a cluster's machines", "add `--ray auto`, or leave them out")
    if ray and at_once != 1:
        raise UnimetricError(
            f"`--parallel` requires runs on this machine, got `--ray {ray}`", "remove `--parallel`; `--gpus 0.25` puts four runs on one GPU"
        )
    check_runs(runs, str(grid))
    place = out or f"runs/{grid.stem}"
    if ray:
        states = study_on_ray(runs, place, address=ray, gpus=gpus, cpus=cpus, pictures=pictures, quiet=quiet)
    else:
        states = study(runs, place, parallel=at_once, pictures=pictures, quiet=quiet)
    if "failed" in states.values():
        raise typer.Exit(1)


def tune(
    search: Annotated[Path, typer.Argument(help="A run's TOML file with `{names}` in its texts and their ranges in [search].")],
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Where run folders go; default `runs/<name of the search>`.")] = None,
    trials: Annotated[int, typer.Option(help="Runs in all, those of earlier times among them.", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="Of the search.", min=0, max=2**32 - 1)] = 0,
) -> None:
    """Search for the best settings on validation classes, which are taken from the training classes; test classes decide nothing.

    Example: `unimetric tune glyphs_search --trials 20`
    """
    from unimetric.config import load
    from unimetric.studies.tune import tune as run
    from unimetric.studies.tune import without_validation

    folder = out or Path("runs") / search.stem
    value, best = run(search, folder, trials=trials, seed=seed, **read_overrides(settings, tune, axes=True))
    print(f"best {value:.4f}: {'  '.join(f'{key} {found}' for key, found in best.items())}")
    split = without_validation(load(folder / "best.toml").split)
    print(f'train on all training classes with: unimetric train {folder / "best.toml"} "split={split}"')


def report(
    runs: Annotated[list[str], typer.Argument(help="Run folders, folders of run folders, or places of fsspec.")],
    out: Annotated[Path, typer.Option(help="The page to write; tables go beside it as .md, .csv and .tex.")] = Path("report.html"),
    galleries: Annotated[int, typer.Option(help="Runs whose pictures are shown, best first.", min=0)] = 24,
    look: Annotated[bool, typer.Option("--look", help="Embed the pictures of runs that left none.")] = False,
    own_epochs: Annotated[bool, typer.Option("--own-epochs", help="Each metric at its own best epoch, as Roth et al. 2020.")] = False,
) -> None:
    """Make one page of many runs: tables, curves, shifts, spectra, neighbours, maps. It needs no network to be read.

    Examples:

    - `unimetric report runs/glyphs_losses --out report.html`
    - `unimetric report runs/a runs/b --look`
    """
    from unimetric.report import report as write
    from unimetric.runs.storage import local_copies

    with local_copies(runs) as folders:
        if look:
            from unimetric.analysis.gallery import look_where_missing

            look_where_missing(folders)
        left_out = write(folders, out, galleries=galleries, own_epochs=own_epochs)
    for folder, reason in left_out:
        print(f"left out {folder}: {reason}", file=sys.stderr)
    print(f"see {out}")
