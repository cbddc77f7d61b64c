"""Declarations of components, read from their source with `ast`.

A declaration has the arguments, the documentation and the class attributes. No component is imported, so
`unimetric list` and `unimetric check` load no torch. Annotations consist of the names of
`unimetric.arguments`, of builtin types and of `typing`. Any other class is replaced by an empty class of the
same name, and a generic one, such as an array with a shape, by `Any`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unimetric import arguments

_ROOT = Path(__file__).parent
_EMPTY = inspect.Parameter.empty
_TYPES: dict[str, Any] = {name: getattr(builtins, name) for name in ("bool", "dict", "float", "int", "list", "str", "tuple")}
_KNOWN: dict[str, Any] = {**_TYPES, **vars(arguments), **{name: getattr(typing, name) for name in ("Annotated", "Any", "Literal")}}
_GENERIC = (list, tuple, typing.Annotated, typing.Literal)


@dataclass(frozen=True)
class Declaration:
    """Declaration of a class or function.

    Args:
        name: Name of the class or function.
        module: Module that defines it.
        doc: Docstring, with the indentation removed.
        is_function: Whether it is a function.
        parameters: Parameters by name, with resolved annotations. A class has those of its constructor.
        members: Class attributes, with those of the base classes, or keywords of the decorators of a function. A value that is the
            name of a class is that name; any other value that is not a literal is missing.
        body: Statements of the function or of the constructor.
        returns: Annotation of what a function returns, as written.
        has_inputs: Whether the parameters of a function before the `*` are its inputs. A function of a component type without
            inputs, such as a dataset, has only arguments.
    """

    name: str
    module: str
    doc: str
    is_function: bool
    parameters: Mapping[str, inspect.Parameter]
    members: Mapping[str, Any] = field(default_factory=dict)
    body: tuple[ast.stmt, ...] = ()
    returns: str = ""
    has_inputs: bool = True

    @property
    def configured(self) -> dict[str, inspect.Parameter]:
        """The parameters that a spec string may set."""
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return {key: each for key, each in self.parameters.items() if not self.is_input(each) and each.kind not in variadic}

    def is_input(self, parameter: inspect.Parameter) -> bool:
        """Return whether a parameter is passed when the component is called, not configured."""
        return self.is_function and self.has_inputs and parameter.kind is not parameter.KEYWORD_ONLY


def declared_by(part: Any, *, has_inputs: bool = True) -> Declaration:
    """Return the declaration of an imported class or function, such as a third-party one.

    Args:
        part: Class or function whose signature is known.
        has_inputs: Whether functions of its component type have inputs.
    """
    signature = inspect.signature(part).parameters
    parameters = {key: each.replace(annotation=arguments.allowed_values(part, key)) for key, each in signature.items()}
    doc = inspect.getdoc(part) or ""
    return Declaration(part.__name__, part.__module__, doc, inspect.isfunction(part), parameters, has_inputs=has_inputs)


@functools.cache
def read_declaration(kind: str, file: str) -> Declaration:
    """Read the declaration of a component.

    Args:
        kind: Folder of the component.
        file: Name of its file without the extension, which is its name in spec strings.

    Returns:
        The class or function whose name is that of the file, apart from case and underscores.
    """
    module = f"unimetric.{kind}.{file}"
    for name in _definitions(module):
        if plain(name) == plain(file):
            return _read(module, name)
    raise TypeError(f"{module} defines nothing called `{file}`")  # a mistake of the package, not of the user


def plain(name: str) -> str:
    """Return a name without case and underscores.

    `multi_similarity` is the file of `MultiSimilarity`.
    """
    return name.lower().replace("_", "")


@functools.cache
def _tree(module: str) -> ast.Module:
    path = _ROOT.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _definitions(module: str) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    return {node.name: node for node in _tree(module).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


@functools.cache
def _read(module: str, name: str) -> Declaration:
    node = _definitions(module)[name]
    doc = ast.get_docstring(node) or ""
    if isinstance(node, ast.FunctionDef):
        marks = [decorator for decorator in node.decorator_list if isinstance(decorator, ast.Call)]
        declared = {each.arg: each.value for mark in marks for each in mark.keywords if each.arg}
        returns = ast.unparse(node.returns) if node.returns else ""
        return Declaration(name, module, doc, True, _parameters(node, module), _literals(declared), tuple(node.body), returns)
    base = next((found for each in node.bases if (found := defined(module, ast.unparse(each)))), None)
    own = {name: value for statement in node.body for name, value in _assigned(statement)}
    constructor = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if constructor is None:
        parameters, body = (base.parameters, base.body) if base else ({}, ())
    else:
        parameters, body = _parameters(constructor, module), tuple(constructor.body)
        parameters.pop("self")
    members = {**(base.members if base else {}), **_literals(own)}
    return Declaration(name, module, doc, False, parameters, members, body)


def defined(module: str, name: str) -> Declaration | None:
    """Return a class or function that a module of this package defines or imports.

    Args:
        module: Module in which the name is used.
        name: Name of the class or function.
    """
    if name in _definitions(module):
        return _read(module, name)
    for statement in _tree(module).body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("unimetric."):
            original = {alias.asname or alias.name: alias.name for alias in statement.names}.get(name)
            if original is not None:
                return defined(str(statement.module), original)
    return None


@functools.cache
def _constants(module: str) -> dict[str, ast.expr]:
    """Return the values that a module assigns to names."""
    return {name: value for statement in _tree(module).body for name, value in _assigned(statement)}


def _assigned(statement: ast.stmt) -> list[tuple[str, ast.expr]]:
    """Return the names and values of an assignment to one name each."""
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
        return [(statement.target.id, statement.value)]
    if isinstance(statement, ast.Assign):
        return [(target.id, statement.value) for target in statement.targets if isinstance(target, ast.Name)]
    return []


def _literals(values: Mapping[str, ast.expr]) -> dict[str, Any]:
    """Return the values that are literals or names of classes."""
    found = {}
    for key, node in values.items():
        try:
            found[key] = _literal(node)
        except ValueError:
            continue
    return found


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Tuple):
        return tuple(_literal(each) for each in node.elts)
    return ast.literal_eval(node)


def _parameters(node: ast.FunctionDef, module: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function, with defaults and annotations."""
    given = node.args
    ordinary = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(ordinary) - len(given.defaults)) + list(given.defaults)
    rows: list[tuple[ast.arg, Any, ast.expr | None]]
    rows = [(each, inspect.Parameter.POSITIONAL_OR_KEYWORD, default) for each, default in zip(ordinary, defaults, strict=True)]
    rows += [(each, inspect.Parameter.VAR_POSITIONAL, None) for each in [given.vararg] if each]
    rows += [(each, inspect.Parameter.KEYWORD_ONLY, default) for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    rows += [(each, inspect.Parameter.VAR_KEYWORD, None) for each in [given.kwarg] if each]
    return {
        each.arg: inspect.Parameter(
            each.arg,
            form,
            default=_EMPTY if default is None else _value(default, module),
            annotation=Any if each.annotation is None else _annotation(each.annotation, module),
        )
        for each, form, default in rows
    }


def _value(node: ast.expr, module: str) -> Any:
    """Return the value of a default or of a bound.

    It may consist of literals, arithmetic, `Range` and constants of the module.
    """
    used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & _constants(module).keys()
    known = _KNOWN | {name: _value(_constants(module)[name], module) for name in used}
    return eval(compile(ast.Expression(node), module, "eval"), {"__builtins__": {}}, known)


def _annotation(node: ast.expr, module: str) -> Any:
    """Return the type that an annotation names."""
    if isinstance(node, ast.BinOp):
        return typing.Union[_annotation(node.left, module), _annotation(node.right, module)]  # noqa: UP007
    if isinstance(node, ast.Constant):
        return _annotation(ast.parse(node.value, mode="eval").body, module) if isinstance(node.value, str) else node.value
    if isinstance(node, ast.Subscript):
        return _generic(_annotation(node.value, module), node.slice, module)
    if isinstance(node, ast.Name):
        if node.id in _constants(module):
            return _annotation(_constants(module)[node.id], module)
        return _KNOWN[node.id] if node.id in _KNOWN else type(node.id, (), {})
    return type(node.attr, (), {}) if isinstance(node, ast.Attribute) else Any


def _generic(of: Any, inside: ast.expr, module: str) -> Any:
    """Return a type with arguments, such as `Annotated[int, Range(1)]`."""
    if of not in _GENERIC:
        return Any
    items = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    if of is typing.Literal:
        return typing.Literal[tuple(_value(each, module) for each in items)]
    if of is typing.Annotated:
        return typing.Annotated[(_annotation(items[0], module), *(_value(each, module) for each in items[1:]))]
    return of[tuple(... if ast.unparse(each) == "..." else _annotation(each, module) for each in items)]
