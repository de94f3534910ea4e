"""What SGLang imports at its start and a host without a GPU does not have: put in place before `import sglang`, on a CPU only.

* `sgl_kernel`, SGLang's compiled kernels: no CPU build is published. kernels.py is imported in its place.
* two operators that torchvision registers fakes for: its library cannot load beside a CPU build of torch.
* `torch.cuda.synchronize`: SGLang calls it when memory is given back.

`install()` is called in each process of the server (serve.py) if the variable SLIPSTREAM_SGLANG_STANDINS is 1; command.py sets
it for a CPU. No file of SGLang is changed, and a package that is really installed is never hidden. `make test-sglang` checks it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

KERNELS = Path(__file__).with_name("kernels.py")


class Finder(importlib.abc.MetaPathFinder):
    """Answers for `sgl_kernel` if nobody else would, and prepares torch the moment that torchvision is looked for."""

    def __init__(self) -> None:
        self._operators: Any = None

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "sgl_kernel" and PathFinder.find_spec(name) is None:
            return importlib.util.spec_from_file_location(name, KERNELS)
        if name == "torchvision" and self._operators is None:
            self._operators = declare_operators()
        return None


def install() -> None:
    """Once a process; later calls do nothing."""
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, Finder())
    without_synchronizing()


def declare_operators() -> Any:
    """The library that holds them, to be kept; torchvision's own, where it loads, declares them itself."""
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return torch.ops.torchvision
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def without_synchronizing() -> None:
    """A CUDA build of torch raises where there is no device to wait for."""
    import torch

    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None
