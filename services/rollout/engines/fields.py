"""Reading the fields of a control call: typed, with defaults, and nothing unknown passes.

`Fields(body, call)`, one method a field, then `end()`, which refuses fields that nobody asked for (so that a typing error
is heard). `ignored` names SGLang's fields that have no meaning here. tests/contract holds the refusals.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_REQUIRED: Any = object()


class BadRequest(ValueError):
    """Answered as HTTP 400."""


class Fields:
    def __init__(self, body: Any, call: str, ignored: Iterable[str] = ()) -> None:
        if not isinstance(body, dict):
            raise BadRequest(f"{call}: expected a JSON object")
        self._left = {name: value for name, value in body.items() if name not in set(ignored)}
        self._call = call

    def _take(self, name: str, kinds: type | tuple[type, ...], default: Any) -> Any:
        value = self._left.pop(name, None)
        if value is None:
            if default is _REQUIRED:
                raise BadRequest(f"{self._call}: {name} is missing")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise BadRequest(f"{self._call}: {name}: {value!r} has the wrong type")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        return self._take(name, str, default)

    def place(self, name: str) -> Any:
        """A name, or an object."""
        return self._take(name, (str, dict), _REQUIRED)

    def flag(self, name: str, default: bool) -> bool:
        return self._take(name, bool, default)

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        return self._take(name, (int, float), default)

    def choice(self, name: str, allowed: tuple[str, ...], default: str | None) -> Any:
        value = self._take(name, str, default)
        if value is not default and value not in allowed:
            raise BadRequest(f"{self._call}: {name}: {value!r} is none of {', '.join(allowed)}")
        return value

    def items(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        value = self._take(name, list, default)
        if value is not default and not all(isinstance(item, kind) for item in value):
            raise BadRequest(f"{self._call}: {name}: expected a list of {kind.__name__}")
        return value

    def end(self) -> None:
        if self._left:
            raise BadRequest(f"{self._call}: unknown field {', '.join(sorted(self._left))}")
