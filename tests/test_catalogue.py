"""Components by attribute: `from unimetric.losses import Margin`, `metrics.recall(space, k=1)`."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import unimetric
from unimetric import Space, UnimetricError, kinds, metrics
from unimetric.cli import stubs
from unimetric.spec import KINDS, components, create, find, names


def test_kinds_have_a_folder_and_an_interface() -> None:
    assert set(KINDS) == set(kinds.OF)
    for kind in KINDS:
        assert (Path(unimetric.__file__).parent / kind / "__init__.py").is_file()
        assert names(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_component_is_an_attribute_of_its_folder(kind: str) -> None:
    folder = getattr(unimetric, kind)
    assert set(components(kind)) == set(names(kind))
    for name, attribute in components(kind).items():
        assert getattr(folder, attribute) is find(kind, name)
        assert attribute in dir(folder) and attribute in folder.__all__
    for attribute in folder.__all__:
        assert getattr(folder, attribute) is not None


def test_importing_a_file_does_not_hide_its_function() -> None:
    for name in names("metrics"):
        importlib.import_module(f"unimetric.metrics.{name}")
        assert inspect.isfunction(getattr(metrics, name)), name


def test_importing_the_file_of_a_class_binds_the_file() -> None:
    from unimetric.losses import SmoothAP, smooth_ap

    assert inspect.ismodule(smooth_ap) and smooth_ap.SmoothAP is SmoothAP


def test_functions_are_called_with_checked_arguments() -> None:
    space = Space(torch.eye(4), torch.tensor([0, 0, 1, 1]))
    assert metrics.recall(space, k=3) == 1.0
    with pytest.raises(UnimetricError, match="`k` must be at least 1, got 0"):
        metrics.recall(space, k=0)


def test_functions_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(metrics.recall)) is metrics.recall


def test_unknown_attributes_name_the_closest() -> None:
    with pytest.raises(AttributeError, match="did you mean `recall`"):
        _ = metrics.recal
    with pytest.raises(AttributeError, match="`nothing`"):
        _ = unimetric.nothing
    with pytest.raises(ImportError):
        from unimetric.losses import Nothing  # noqa: F401


def test_unknown_folder_names_the_closest() -> None:
    with pytest.raises(UnimetricError, match="unknown component type `loss`") as error:
        create("loss", "margin")
    assert error.value.hint == "did you mean `losses`?"


def test_help_shows_the_components_of_a_folder() -> None:
    text = pydoc.plain(pydoc.render_doc(metrics))
    assert "recall(space: 'Space', *, k:" in text and "measure(" in text


def test_names_are_known_before_anything_is_imported() -> None:
    code = (
        "import sys, unimetric; from unimetric import losses, metrics; "
        "assert 'Margin' in dir(losses) and 'losses' in dir(unimetric) and 'recall' in metrics.__all__; "
        "assert not {'torch', 'numpy', 'unimetric.losses.margin'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_one_loss_imports_no_other() -> None:
    code = "import sys; from unimetric.losses import Margin; assert 'unimetric.losses.arcface' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_star_import_has_every_component() -> None:
    space: dict[str, object] = {}
    exec("from unimetric.miners import *", space)
    assert set(components("miners").values()) <= set(space)


def test_stubs_are_up_to_date(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not stubs.outdated(), "run `make docs`"
    assert stubs.main(["--check"]) == 0
    # A component that is not in the stub is noticed, and written.
    for kind in KINDS:
        (tmp_path / kind).mkdir()
    monkeypatch.setattr(stubs, "stub_path", lambda kind: tmp_path / kind / "__init__.pyi")
    assert stubs.main(["--check"]) == 1 and "not up to date" in capsys.readouterr().err
    assert stubs.main([]) == 0 and stubs.main(["--check"]) == 0
    assert "from unimetric.losses.margin import Margin as Margin\n" in (tmp_path / "losses/__init__.pyi").read_text()
