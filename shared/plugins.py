"""A user's function by its dotted path: the one way in which plug-ins are found.

The run file's folder is put at the end of the import path, so that a plug-in beside it needs no installation and cannot hide a
module of ours. Whatever a plug-in does wrong while it is imported becomes a `PluginError` that names the field.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


class PluginError(ValueError):
    """The function cannot be had. The text names the field and the fix."""


def find_function(dotted: str, base: str, field: str) -> Callable[..., Any]:
    """The function at `dotted`, looked for in the environment and in the folder `base`. Raises PluginError."""
    module, _, name = dotted.rpartition(".")
    if not module:
        raise PluginError(f"{field}: {dotted!r} is no dotted path; write module.function")
    if base not in sys.path:
        sys.path.append(base)
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"{field}: cannot import {dotted!r} ({error}); modules are looked for beside the run file"
        ) from error
    except Exception as error:  # a user's module may raise anything while it is imported
        raise PluginError(f"{field}: {module!r} fails while it is imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise PluginError(f"{field}: {dotted!r} is not a function")
    return found
