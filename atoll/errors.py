"""Errors a user can mend, and the helpers that word them."""

import difflib
from collections.abc import Iterable
from numbers import Integral


class AtollError(Exception):
    """Something the user gave cannot work. The message, one line, names the value and the remedy."""


class Refused(Exception):
    """A message that cannot count; the text says why."""


def unknown(kind: str, name: str, options: Iterable[str]) -> AtollError:
    """Error for a `name` that is none of `options`, with the nearest one suggested."""
    known = sorted(options)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else "choose one of: " + ", ".join(known)
    return AtollError(f"unknown {kind} '{name}'; {hint}")


def require(condition: bool, message: str) -> None:
    """Raise `AtollError(message)` unless `condition` holds."""
    if not condition:
        raise AtollError(message)


def check_counts(**values: int | None) -> None:
    """Every count must be at least 1; None stands for a default."""
    for name, value in values.items():
        require(value is None or value >= 1, f"{name} is {value}; it must be at least 1")


def check_whole(settings: object, *names: str) -> None:
    """Every named field of `settings` must be a whole number."""
    for name in names:
        value = getattr(settings, name)
        require(isinstance(value, Integral), f"{name} is {value!r}; it must be a whole number")
