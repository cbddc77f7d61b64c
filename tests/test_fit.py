"""The fit of components, read from their source, agrees with building them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from unimetric.config import load, shipped_configs
from unimetric.errors import UnimetricError
from unimetric.fit import check_declared_fit
from unimetric.studies.grid import check_runs
from unimetric.studies.ranges import is_grid, read_any
from unimetric.training.build import check_fit

MISFITS = [
    {"loss": "circle", "miner": "semihard"},
    {"loss": "proxy_anchor", "miner": "semihard"},
    {"loss": "circle(miner='semihard')"},
    {"loss": "triplet(miner='rho')", "objective": "cross_batch(size=16)"},
    {"loss": "margin(or_count=True)", "miner": "multi_similarity"},
    {"loss": "margin(or_count=True, miner='all')"},
    {"objective": "s2sd(loss='circle')", "miner": "semihard"},
    {"sampler": "samples_per_class(n=3)"},
    {"sampler": "distance_matching(big_batch=3)"},
    {"objective": "crt"},
    {"objective": "crt", "head": "diva"},
    {"objective": "diva"},
    {"objective": "diva", "head": "crt"},
    {"head": "linear(orthogonal=True, init='kaiming')"},
    {"head": "crt(coded=True, pool='mean')"},
    {"head": "crt(prototype_std=1.0, init='orthogonal')"},
    {"geometry": "poincare"},
]
FITS = [
    {"loss": "margin", "miner": "multi_similarity"},
    {"loss": "triplet(miner='rho')"},
    {"loss": "margin(or_count=True)", "miner": "semihard"},
    {"objective": "crt", "head": "crt"},
    {"objective": "diva", "head": "diva"},
    {"objective": "crt(diversity=0)", "head": "crt(coded=False, pool='mean')"},
    {"loss": "hyperbolic", "geometry": "poincare"},
    {"sampler": "samples_per_class(n=3)", "batch_size": 111},
    {"objective": "cross_batch(size=112)"},
    {"loss": "proxy_anchor", "sampler": "shuffle"},
]


@pytest.mark.parametrize("settings", MISFITS, ids=str)
def test_misfit_is_found_in_the_source_as_when_built(settings: dict[str, str]) -> None:
    config = load(**settings)
    errors = []
    for check in (check_declared_fit, check_fit):
        with pytest.raises(UnimetricError) as caught:
            check(config, "place")
        errors.append((caught.value.message, caught.value.hint))
    assert errors[0] == errors[1]
    assert errors[0][0].startswith("place: ") and errors[0][1]


@pytest.mark.parametrize("settings", FITS, ids=str)
def test_fit_is_accepted_as_when_built(settings: dict[str, str]) -> None:
    config = load(**settings)
    check_declared_fit(config, "place")
    check_fit(config, "place")


def test_conditions_of_backbones_and_adapters_are_read() -> None:
    for settings in ({"adapter": "vpt(deep=True, placed=True)"}, {"backbone": "timm(name='resnet50', pretrained=True, weights='a')"}):
        with pytest.raises(UnimetricError, match=r"requires `deep=False`|only one of `pretrained` and `weights`"):
            check_declared_fit(load(**settings), "place")


def test_shipped_configs_fit_without_torch() -> None:
    code = (
        "import sys; from unimetric.config import *; from unimetric.studies.ranges import *; from unimetric.studies.grid import *\n"
        "for name in shipped_configs():\n"
        "    check_runs(read_any(name) if is_grid(name) else [Run(load(name), {})], name, build=False)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_check_of_a_grid_names_the_run() -> None:
    runs = read_any("glyphs_losses", miner="semihard") if is_grid("glyphs_losses") else []
    assert "glyphs_losses" in shipped_configs() and runs
    with pytest.raises(UnimetricError, match=r"^grid: .*(takes none|reads)"):
        check_runs(runs, "grid", build=False)
