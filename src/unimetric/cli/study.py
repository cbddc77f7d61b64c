"""Commands for studies of many runs: `bench`, `tune`, `report`."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from unimetric.cli.options import RayAddress, Settings, check_outputs, read_overrides
from unimetric.errors import UnimetricError


def bench(
    grid: Annotated[Path, typer.Argument(help="Grid: TOML file of a run with lists for some settings, or its name in the package.")],
    settings: Settings = None,
    out: Annotated[str, typer.Option(help="Folder of the run folders (default: `runs/<grid>`). With --ray, any fsspec URL.")] = "",
    ray: RayAddress = "",
    gpus: Annotated[float, typer.Option(help="With --ray: GPUs per run; 0.5 puts two runs on one GPU.", min=0)] = 0.0,
    cpus: Annotated[float, typer.Option(help="With --ray: CPU cores per run.", min=0)] = 1.0,
    parallel: Annotated[str, typer.Option(help="Number of runs at once on this machine, or `auto`: as many as fit in its memory.")] = "1",
    images: Annotated[bool, typer.Option(help="Neighbors and maps of each run for the report (`gallery.npz`).")] = True,
    quiet: Annotated[bool, typer.Option(help="No output.")] = False,
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
        raise UnimetricError("`--gpus` and `--cpus` require `--ray`", "add `--ray auto`, or remove them")
    if ray and at_once != 1:
        raise UnimetricError(
            f"`--parallel` requires runs on this machine, got `--ray {ray}`", "remove `--parallel`; `--gpus 0.25` puts four runs on one GPU"
        )
    check_runs(runs, str(grid))
    folder = out or f"runs/{grid.stem}"
    if ray:
        states = study_on_ray(runs, folder, address=ray, gpus=gpus, cpus=cpus, pictures=images, quiet=quiet)
    else:
        states = study(runs, folder, parallel=at_once, pictures=images, quiet=quiet)
    if "failed" in states.values():
        raise typer.Exit(1)


def tune(
    search: Annotated[Path, typer.Argument(help="TOML file of a run with `{names}` in some settings and their ranges in [search].")],
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run folders (default: `runs/<search>`).")] = None,
    trials: Annotated[int, typer.Option(help="Total number of trials, including finished ones.", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the search.", min=0, max=2**32 - 1)] = 0,
) -> None:
    """Search hyperparameters on held-out validation classes.

    Validation classes are taken from the training classes. Test classes are not used.

    Examples:

    - `unimetric tune glyphs_search --trials 20`
    """
    from unimetric.config import load
    from unimetric.studies.tune import tune as run
    from unimetric.studies.tune import without_validation

    folder = out or Path("runs") / search.stem
    value, best = run(search, folder, trials=trials, seed=seed, **read_overrides(settings, tune, axes=True))
    print(f"best {value:.4f}: {'  '.join(f'{key} {found}' for key, found in best.items())}")
    split = without_validation(load(folder / "best.toml").split)
    print(f'train on all training classes with: unimetric train {quote(str(folder / "best.toml"))} "split={split}"')


def report(
    runs: Annotated[list[str], typer.Argument(help="Run folders, folders of run folders, or fsspec URLs.")],
    out: Annotated[Path, typer.Option(help="HTML file; the tables are saved next to it as .md, .csv and .tex.")] = Path("report.html"),
    galleries: Annotated[int, typer.Option(help="Number of runs with neighbors and maps, best first.", min=0)] = 24,
    embed: Annotated[bool, typer.Option("--embed", help="Embedding of test images for runs without `gallery.npz`.")] = False,
    own_epochs: Annotated[
        bool, typer.Option("--own-epochs", help="Best epoch per metric on the test classes, as in Roth et al. 2020.")
    ] = False,
) -> None:
    """Write an HTML report with tables, curves, neighbors and maps.

    The report is one file and loads nothing from the network.

    Examples:

    - `unimetric report runs/glyphs_losses --out report.html`
    - `unimetric report runs/a runs/b --embed`
    """
    from unimetric.report import report as write
    from unimetric.runs.storage import local_copies

    check_outputs(out)
    with local_copies(runs) as folders:
        failed = []
        if embed:
            from unimetric.analysis.gallery import write_missing_galleries

            failed = write_missing_galleries(folders)
        skipped = write(folders, out, galleries=galleries, own_epochs=own_epochs, failed=failed)
    for path, reason in skipped:
        print(f"warning: skipped {path}: {reason}", file=sys.stderr)
    print(f"see {out}")
