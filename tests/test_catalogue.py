"""Components by attribute: `from unimetric.losses import Margin`, `metrics.recall(space, k=1)`."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pydoc
import subprocess
import sys
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import torch

import unimetric
from unimetric import Space, UnimetricError, kinds, metrics
from unimetric.arguments import allowed_values
from unimetric.cli import stubs
from unimetric.declarations import read_declaration
from unimetric.spec import KINDS, components, create, find, names, signature


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


def shape(allowed: Any) -> Any:
    """An annotation with classes by name, and without what only type checkers read, such as the shape of an array."""
    origin, options = get_origin(allowed), get_args(allowed)
    if origin is Annotated:
        return shape(options[0]), allowed.__metadata__
    if origin in (Union, UnionType):
        return "or", tuple(map(shape, options))
    if origin in (list, tuple):
        return origin, tuple(map(shape, options))
    if origin is Literal:
        return allowed
    return allowed.__name__ if type(allowed) is type else "any"


@pytest.mark.parametrize("kind", KINDS)
def test_source_and_import_agree_on_every_component(kind: str) -> None:
    for name in names(kind):
        read, part = read_declaration(kind, name), find(kind, name)
        live = {key: each for key, each in signature(part).parameters.items() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
        assert list(read.parameters) == list(live), name
        for key, parameter in live.items():
            assert read.parameters[key].default == parameter.default and read.parameters[key].kind == parameter.kind, (name, key)
            assert type(read.parameters[key].default) is type(parameter.default), (name, key)
            assert shape(read.parameters[key].annotation) == shape(allowed_values(part, key)), (name, key)
        assert (read.name, read.doc, read.is_function) == (part.__name__, inspect.getdoc(part), inspect.isfunction(part))


@pytest.mark.parametrize(
    ("kind", "member"),
    [
        ("losses", "family"),
        ("losses", "default_miner"),
        ("losses", "reads"),
        ("miners", "gives"),
        ("objectives", "views"),
        ("heads", "test_time"),
        ("samplers", "needs_embeddings"),
        ("metrics", "better"),
    ],
)
def test_source_and_import_agree_on_attributes(kind: str, member: str) -> None:
    for name in names(kind):
        live = getattr(find(kind, name), member)
        if isinstance(live, property):  # of an objective around another one, whose value it has
            continue
        shown = tuple(getattr(each, "__name__", each) for each in live) if isinstance(live, tuple) else getattr(live, "__name__", live)
        assert read_declaration(kind, name).members.get(member, "higher") == shown, name


@pytest.mark.parametrize(
    "words",
    [
        "list",
        "list losses",
        "list losses margin",
        "list settings",
        "configs",
        "--help",
        "--version",
        "train --help",
        "check cub200_margin glyphs_losses",
        "check loss=circle miner=semihard",
        "check metrics=recall(k=0)",
    ],
)
def test_commands_do_not_import_torch(words: str) -> None:
    code = (
        "import sys; from unimetric.cli import main; sys.argv = ['unimetric', *sys.argv[1:]]\n"
        "try: main()\n"
        "finally: assert not {'torch', 'timm', 'lightning'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True, timeout=120)
    assert "AssertionError" not in done.stderr and done.returncode in (0, 2), done.stderr
    assert (done.returncode == 2) == ("circle" in words or "k=0" in words)


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
