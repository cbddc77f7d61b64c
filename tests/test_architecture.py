"""Rules of this project that no linter checks."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

from unimetric.spec import KINDS, find, names, signature

SOURCE = Path(__file__).parents[1] / "src" / "unimetric"
FILES = sorted(SOURCE.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> set[str]:
    tree = parsed(path)
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[0] for name in found | {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}}


def test_nothing_has_a_name_that_says_nothing() -> None:
    banned = {"utils", "util", "common", "misc", "helpers", "base_", "core"}
    assert not [path for path in FILES if path.stem in banned]
    text = "\n".join(path.read_text() for path in FILES)
    assert not re.findall(r"class \w*(?:Manager|Factory|Wrapper|Helper)\b", text)


def test_timm_and_transformers_are_imported_in_backbones_only() -> None:
    for path in FILES:
        if path.parent.name not in ("backbones", "adapters") and path.name != "hub.py":  # which writes folders that timm opens
            assert not imports(path) & {"timm", "transformers"}, path


def test_training_needs_none_of_what_a_bare_machine_lacks() -> None:
    for path in FILES:
        assert not imports(path) & {"faiss", "pydantic", "plotly", "ray", "pytorch_metric_learning", "beartype"}, path


def test_files_are_put_in_place_by_one_module_and_signals_are_named_by_one() -> None:
    def naming(word: str) -> set[str]:
        return {path.relative_to(SOURCE).as_posix() for path in FILES if word in path.read_text()}

    assert naming("os.replace(") == {"files.py"}
    assert naming("signal.SIGINT") == {"images/workers.py"}


@pytest.mark.parametrize("kind", ["losses", "miners"])
def test_nothing_in_a_loss_or_miner_waits_for_the_device(kind: str) -> None:
    for path in (SOURCE / kind).glob("*.py"):
        assert not re.search(r"\.item\(|\.cpu\(|(?<!count_)nonzero\(|\.tolist\(|masked_select|torch\.unique", path.read_text()), path


@pytest.mark.parametrize("kind", KINDS)
def test_every_argument_is_typed_keyword_only_and_documented(kind: str) -> None:
    for name in names(kind):
        part = find(kind, name)
        for key, parameter in signature(part).parameters.items():
            assert parameter.kind is not parameter.VAR_KEYWORD or "__init__" not in vars(part), (name, key)
            if parameter.kind is parameter.KEYWORD_ONLY:
                assert parameter.annotation is not parameter.empty, (name, key)
                assert re.search(rf"^\s*(?:\w+, )*{key}(?:, \w+)*: ", part.__doc__, re.M), f"{name} does not document `{key}`"


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"datasets"}))
def test_every_part_cites_its_source(kind: str) -> None:
    for name in names(kind):
        assert re.search(r"\b(?:19|20)\d\d\b", find(kind, name).__doc__), f"{kind}/{name}"


def test_no_path_of_a_machine_and_no_registry_is_named() -> None:
    root = SOURCE.parents[1]
    for path in [
        *FILES,
        *root.glob("*.*"),
        *root.glob("docs/**/*.md"),
        *root.glob("src/unimetric/configs/**/*.toml"),
        *root.glob("benchmarks/*"),
    ]:
        if path.is_file() and path.suffix in (".py", ".md", ".toml", ".txt"):
            assert not re.search(r"/work/|/root/|/home/\w|pypi\.org|files\.pythonhosted|registry\.npmjs", path.read_text()), path


# --- who imports whom: every import statement counts, those inside of functions, too -------------------------------------------


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def project_imports(path: Path) -> set[str]:
    """Modules of this project that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module or "")
    return {name for name in found if name.split(".")[0] == "unimetric"}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return {name: project_imports(path) for name, path in MODULES.items()}


def test_imports_name_modules_that_exist(graph: dict[str, set[str]]) -> None:
    assert not [(name, other) for name, others in graph.items() for other in others if other not in MODULES]


def test_no_cycle_of_imports(graph: dict[str, set[str]]) -> None:
    done: set[str] = set()

    def follow(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in sorted(graph.get(name, ())):
                follow(other, (*path, name))
            done.add(name)

    for name in graph:
        follow(name, ())


def layers() -> list[list[str]]:
    """The contract of import-linter, the highest layer first."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())
    contract = next(each for each in project["tool"]["importlinter"]["contracts"] if each["type"] == "layers")
    return [[word.strip(" ()") for word in layer.split("|")] for layer in contract["layers"]]


def test_imports_point_down(graph: dict[str, set[str]]) -> None:
    depth = {name: number for number, layer in enumerate(layers()) for name in layer}

    def layer_of(module: str) -> str:
        return ".".join(module.split(".")[:2])

    for name, others in graph.items():
        if name == "unimetric":  # its public names are imported when they are used
            continue
        assert layer_of(name) in depth, f"{name} is in no layer"
        for other in others:
            assert other != "unimetric", f"{name} imports the package itself"
            here, there = layer_of(name), layer_of(other)
            assert here == there or depth[here] < depth[there], f"{name} imports {other}"


#: Private modules that another package imports, with the reason.
SHARED = {
    "unimetric.stores._where": "filters, which `Index` parses and checks for every store",
    "unimetric.stores._points": "names of columns, which a build checks before it writes any",
    "unimetric.backbones._hub": "weights of the hub, which a new run resolves once",
    "unimetric.analysis.figures._runs": "labels of a study, which the ensemble reads as well",
}


def test_private_modules_are_imported_in_their_package(graph: dict[str, set[str]]) -> None:
    found = set()
    for name, others in graph.items():
        for other in others:
            package, _, module = other.rpartition(".")
            if module.startswith("_") and not name.startswith(package):
                found.add(other)
    assert found == set(SHARED)


def test_importlib_reaches_project_modules_from_spec_only() -> None:
    for path in FILES:
        for node in ast.walk(parsed(path)):
            called = getattr(node, "func", None)
            if getattr(called, "attr", getattr(called, "id", "")) not in ("import_module", "__import__"):
                continue
            first = node.args[0] if isinstance(node, ast.Call) and node.args else None
            elsewhere = isinstance(first, ast.Constant) and str(first.value).split(".")[0] != "unimetric"
            assert elsewhere or path.name == "spec.py", f"{path}: {ast.unparse(node)}"


# --- Docstrings -----------------------------------------------------------------------------------


def long_summaries(tree: ast.Module) -> list[str]:
    """Return the first paragraphs of docstrings that have more than 88 characters."""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, nodes)]
    return [summary for summary in (each.partition("\n\n")[0] for each in found) if len(summary) > 88]


def test_docstring_summaries_have_at_most_88_characters() -> None:
    short = "Return it" + "." * 79
    assert long_summaries(ast.parse(f'def f():\n    """{short}.\n\n    Details of it."""')) == [f"{short}."]
    assert not long_summaries(ast.parse(f'def f():\n    """{short}\n\n    Details of it."""'))
    found = {path.relative_to(SOURCE).as_posix(): long_summaries(parsed(path)) for path in FILES}
    assert {name: summaries for name, summaries in found.items() if summaries} == {}


# --- Size of functions ----------------------------------------------------------------------------


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Return the number of lines of a function's body, without docstring and blank lines."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return sum(bool(line.strip()) for line in lines[body[0].lineno - 1 : function.end_lineno]) if body else 0


def test_functions_have_at_most_60_lines() -> None:
    example = 'def f():\n    """Summary.\n\n    Details."""\n    x = 1\n\n    return x'
    assert body_lines(ast.parse(example).body[0], example.splitlines()) == 2  # type: ignore[arg-type]
    found: dict[str, int] = {}
    for name, path in MODULES.items():
        lines = path.read_text().splitlines()
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[f"{name}.{node.name}"] = max(body_lines(node, lines), found.get(f"{name}.{node.name}", 0))
    loop = found.pop("unimetric.training.loop.train")
    assert loop > 30, "the training loop is one function"
    assert not {name: count for name, count in found.items() if count > 60}


# --- who asks whether a component has a member ----------------------------------------------------------------------------------


def probes(tree: ast.AST) -> list[str]:
    """Calls of `hasattr`, and of `getattr` with a default, except for those that ask which operating system this is."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) >= 2:
            asks = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
            if asks and ast.unparse(node.args[0]) not in ("os", "signal"):
                found.append(ast.unparse(node))
    return found


#: Files that probe something that is not a component.
PROBES = {
    "kinds.py": "groups: options that any module inside an objective may set",
    "foreign.py": "third-party components: the one place for them",
    "backbones/timm.py": "networks of timm, which have no common interface",
    "spec.py": "names of modules, classes and functions",
    "arguments.py": "globals of a function",
    "cli/options.py": "metadata of a type hint",
    "geometry/shards.py": "parameters, of which few are divided among ranks",
    "analysis/ensemble.py": "rows of a split by name",
}


def test_only_kinds_and_foreign_ask_whether_a_component_has_a_member() -> None:
    found = {path.relative_to(SOURCE).as_posix(): probes(parsed(path)) for path in FILES}
    assert {name: calls for name, calls in found.items() if calls and name not in PROBES} == {}
    assert not [name for name in PROBES if not found[name]], "no longer needed in the list"
    asked = {name for name, calls in found.items() if any(call.startswith("hasattr") for call in calls)}
    assert asked <= {"kinds.py", "foreign.py"}


@pytest.mark.parametrize(
    "line", ["hasattr(objective, 'begin')", "x = getattr(head, 'dims', (head.dim,))", "if not hasattr(self.head, 'join'): pass"]
)
def test_a_probe_is_found(line: str) -> None:
    assert probes(ast.parse(f"def use(self, head, objective):\n    {line}"))
    assert not probes(ast.parse("hasattr(os, 'fork'), getattr(config, key), signal.SIGINT"))
