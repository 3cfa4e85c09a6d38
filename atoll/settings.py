"""Settings: frozen dataclasses that are JAX pytrees, can be written as text and come back from text.

Numbers that a program may vary without being compiled again (every `float` field) are leaves of the pytree; all other
fields are static. So a sweep over a learning rate reuses one compiled program, or runs as one batch.

Text comes in two forms. A *spec* such as ``dirichlet(alpha=0.3)`` names one small setting on a command line;
`to_dict` / `from_dict` carry whole nested settings through JSON.
"""

import ast
import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

import jax
import numpy as np
import tyro

from .errors import AtollError, unknown

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def settings(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass and a pytree whose leaves are its `float` fields."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    hints = get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    leaves = [name for name in names if hints[name] is float]
    static = [name for name in names if hints[name] is not float]

    def flatten(value: T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(value, n) for n in leaves), tuple(getattr(value, n) for n in static)

    def unflatten(aux: tuple[Any, ...], children: tuple[Any, ...]) -> T:
        value = object.__new__(cls)  # not through __init__: its checks cannot read a traced number
        for name, content in zip(leaves + static, (*children, *aux), strict=True):
            object.__setattr__(value, name, content)
        return value

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return cls


def typed(metavar: str = "SPEC") -> Any:
    """For `Annotated`: a setting that is written as text on a command line."""
    return tyro.conf.arg(constructor=str, metavar=metavar, help_behavior_hint=_usually)


def _usually(default: str) -> str:
    """The hint about a default, which tyro hands over as a list of one word, as one would type it."""
    [word] = ast.literal_eval(default)
    return f'(default: "{word}")' if "(" in word else f"(default: {word})"  # a shell would stumble over brackets


def parse_spec(kind: str, registry: Mapping[str, type[T]], text: str | T) -> T:
    """Build the setting that a spec names: ``name``, ``name(0.3)`` or ``name(alpha=0.3, labels=2)``.

    A setting that is built already is returned as it is.
    """
    if not isinstance(text, str):
        return text
    name, bracket, inside = text.strip().partition("(")
    name = name.strip()
    if name not in registry:
        raise unknown(kind, name, registry)
    cls = registry[name]
    try:
        if bracket and not inside.rstrip().endswith(")"):
            raise ValueError("the closing bracket is missing")
        call = ast.parse(f"f({inside.rstrip()[:-1]})" if bracket else "f()", mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "f"):
            raise ValueError("it is not a name with settings in brackets")
        hints = get_type_hints(cls)
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        if len(call.args) > len(names):
            raise ValueError(f"it has {len(call.args)} settings, {name} takes {len(names)}")
        given = dict(zip(names, call.args, strict=False)) | {str(word.arg): word.value for word in call.keywords}
        unfit = [key for key in given if key not in hints]
        if unfit:
            raise ValueError(f"there is no setting '{unfit[0]}'")
        return cls(**{key: _revive(hints[key], _literal(value), {}, key) for key, value in given.items()})
    except (ValueError, SyntaxError, TypeError) as error:
        fields = ", ".join(f"{f.name}={f.default!r}" for f in dataclasses.fields(cls))  # type: ignore[arg-type]
        raise AtollError(f"cannot read the {kind} '{text}' ({error}); write {name}({fields})") from error


def _literal(node: ast.expr) -> Any:
    try:
        return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)} is no number, name or text") from None


def spec(registry: Mapping[str, type[T]], value: T | str) -> str:
    """Text from which `parse_spec` builds `value` again."""
    if isinstance(value, str):
        return value
    name = next((name for name, cls in registry.items() if cls is type(value)), None)
    if name is None:
        raise AtollError(f"{type(value).__name__} has no name; register it, so that the run can be repeated")
    fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]  # type: ignore[arg-type]
    return f"{name}({', '.join(f'{key}={content!r}' for key, content in fields)})" if fields else name


def to_dict(value: Any, names: Mapping[type[Any], str]) -> Any:
    """`value` as JSON content; a dataclass found in `names` carries its name as ``kind``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        content = {f.name: to_dict(getattr(value, f.name), names) for f in dataclasses.fields(value)}
        return {"kind": names[type(value)], **content} if type(value) in names else content
    if isinstance(value, Mapping):
        return {key: to_dict(item, names) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_dict(item, names) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise AtollError(f"a {type(value).__name__} cannot be written into a config; give it by name or by path")


def from_dict(cls: type[T], content: Any, kinds: Mapping[str, type[Any]], where: str = "config") -> T:
    """The inverse of `to_dict`; unknown or missing entries are errors that say where."""
    if not isinstance(content, Mapping):
        raise AtollError(f"{where}: expected an object with the fields of {cls.__name__}, found {content!r}")
    content = dict(content)
    if "kind" in content:
        kind = content.pop("kind")
        if not isinstance(kind, str) or kind not in kinds:
            raise unknown(f"kind in {where}", str(kind), kinds)
        cls = kinds[kind]
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in content:
        if name not in fields:
            raise unknown(f"setting in {where}", name, fields)
    values = {name: _revive(hints[name], item, kinds, f"{where}.{name}") for name, item in content.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise AtollError(f"{where}: {error}") from error


def _revive(hint: Any, item: Any, kinds: Mapping[str, type[Any]], where: str) -> Any:
    if get_origin(hint) is Literal:
        if item not in get_args(hint):
            raise unknown(where, str(item), map(str, get_args(hint)))
        return item
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if isinstance(item, Mapping):
        target = next(
            (o for o in options if isinstance(o, type) and (dataclasses.is_dataclass(o) or "kind" in item)), None
        )
        if target is None:
            raise AtollError(f"{where}: did not expect an object here")
        return from_dict(target, item, kinds, where)
    for option in options:
        if get_origin(option) is tuple and isinstance(item, list | tuple):
            return tuple(_revive(get_args(option)[0], entry, kinds, f"{where}[{i}]") for i, entry in enumerate(item))
    if float in options and isinstance(item, int) and not isinstance(item, bool) and int not in options:
        return float(item)
    if type(item) not in options and not (item is None and type(None) in options):
        wanted = " or ".join(getattr(option, "__name__", str(option)) for option in options)
        raise AtollError(f"{where} is {item!r}; it must be of type {wanted}")
    return item
