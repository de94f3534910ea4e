"""Lets megatron-core train on a machine without CUDA. Does nothing where CUDA exists.

megatron-core has no CPU mode, yet most of what it does with CUDA is asking for the current device and naming it in tensor
factories. Each part below answers one such assumption and says which one. `install` runs once, when this package is
imported, and must run before any other import of megatron. The environment variable SLIPSTREAM_MEGATRON_COMPAT chooses the
parts by name ("jit,device"), or "off"; leave it unset outside of experiments. The patches hold for the whole process, so a
process that needs the true `torch.cuda` answers on a machine without CUDA must not import this package.

Enforced by tests/trainer/test_megatron.py and tests/trainer/layouts, which train through every part.
"""

from __future__ import annotations

import importlib
import logging
import os
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

ENVIRONMENT = "SLIPSTREAM_MEGATRON_COMPAT"

NOISE = (
    "(Transformer Engine and )?Apex (is|are) not installed",  # both are optional and need a GPU
    "full scope is deprecated",
    "When using (async grad allreduce|sequence parallelism) it is recommended",  # build.py sets that, for CUDA
    "The .grad attribute of a Tensor that is not a leaf",  # the distributed optimiser updates views
    "`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
)
"""Warnings that megatron brings about at imports and in each process, and that nobody here can act on."""


class CompatError(RuntimeError):
    """The compatibility parts cannot be applied as asked."""


def _device() -> None:
    """Rotary embeddings, gradient buffers and parallel layers allocate on `torch.cuda.current_device()` and synchronise it."""
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_args, **_kwargs: None
    # Shared embeddings move their weight to the device once more when the model is built.
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign,assignment]


class _TorchWithoutCuda(types.ModuleType):
    """Stands in for the name `torch` inside one megatron module: factories turn device="cuda" into the CPU."""

    FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "empty_like")

    def __init__(self) -> None:
        super().__init__("torch")
        for name in self.FACTORIES:
            setattr(self, name, self._on_cpu(getattr(torch, name)))

    @staticmethod
    def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return factory(*args, **kwargs)

        return make

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


LITERAL_MODULES = (
    "pipeline_parallel.schedules",  # the token counter of a batch
    "optimizer.optimizer",  # the loss scale of FP32Optimizer
    "optimizer.clip_grads",  # the overflow flag of the gradient norm
    "utils",  # the gradient norm itself
    "transformer.moe.moe_utils",  # the record of auxiliary losses
)


def _literal() -> None:
    """Some modules write device="cuda" as a literal, which `_device` cannot answer."""
    proxy = _TorchWithoutCuda()
    for name in LITERAL_MODULES:
        importlib.import_module(f"megatron.core.{name}").torch = proxy  # type: ignore[attr-defined]


def _rng() -> None:
    """Activation recomputation saves and restores the CUDA generator; here the CPU generator is the one that counts."""
    torch.cuda.get_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment,return-value]
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()  # type: ignore[attr-defined]
    random._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)  # type: ignore[attr-defined]
    # It warns at each fork that the CPU generator has moved, which is the point here.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


def _experts() -> None:
    """The dispatcher of tokens to experts copies its counts to the host on a side stream; here they are there already."""
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher").MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = "none"  # anything but None, which would have it make a CUDA stream

    def counts_to_host(self: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
        if not self.drop_and_pad and point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits"):
                counts = getattr(self, name, None)
                if isinstance(counts, torch.Tensor):
                    setattr(self, name, counts.tolist())
        return tokens_per_expert

    dispatcher._maybe_dtoh_and_synchronize = counts_to_host
    utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(utils, "te_general_gemm"):  # only defined with Transformer Engine, but the router asks for it
        utils.te_general_gemm = None  # type: ignore[attr-defined]


def _uneven() -> None:
    """Experts that are cut themselves gather different numbers of tokens from each rank, which gloo refuses: fill up, cut."""
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    even_gather, even_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(
        input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, *args: Any
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, output_split_sizes, *args)
        filled = input_.new_zeros(max(output_split_sizes), *input_.shape[1:])
        filled[: len(input_)] = input_
        parts = [torch.empty_like(filled) for _ in output_split_sizes]
        dist.all_gather(parts, filled, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    def scatter(
        input_: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, *args: Any
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(input_, group, input_split_sizes, *args)
        total = input_.clone()
        dist.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].contiguous()

    mappings._gather_along_first_dim = gather  # type: ignore[attr-defined]
    mappings._reduce_scatter_along_first_dim = scatter  # type: ignore[attr-defined]


@contextmanager
def _eager() -> Iterator[None]:
    """Fused functions are wrapped in torch.compile at import: that needs a C++ compiler and up to a minute at the first call,
    and loading the compiler itself costs seconds. Megatron keeps what it finds under this name, for later imports too."""
    before = torch.compile
    torch.compile = _not_compiled  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = before  # type: ignore[method-assign]


def _not_compiled(function: Callable[..., Any] | None = None, **_options: Any) -> Callable[..., Any]:
    """In place of torch.compile, as a decorator with or without options."""
    return function if function is not None else lambda decorated: decorated


@contextmanager
def cuda_type_names(device: torch.device) -> Iterator[None]:
    """The bfloat16 optimiser compares `parameter.type()` with the names of CUDA tensors: lend them to CPU tensors meanwhile."""
    if device.type == "cuda":
        yield
        return
    true_type = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = true_type(self, *args, **kwargs)
        return answer if args or kwargs else answer.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = cuda_type  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.type = true_type  # type: ignore[method-assign,assignment]


PARTS: dict[str, Callable[[], None]] = {
    "device": _device,
    "literal": _literal,
    "rng": _rng,
    "experts": _experts,
    "uneven": _uneven,
}
"""Patches made after megatron's import; one more part, `jit`, wraps the import itself."""


def install(parts: str | None = None) -> tuple[str, ...]:
    """Import megatron-core with the given parts (default: all that this machine needs) and return their names."""
    chosen = _choose(os.environ.get(ENVIRONMENT) if parts is None else parts)
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("megatron").setLevel(logging.WARNING)  # it writes out every config and every list of parameters
    with _eager() if "jit" in chosen else nullcontext():
        importlib.import_module("megatron.core")
    for name in chosen:
        if name in PARTS:
            PARTS[name]()
    return chosen


def _choose(text: str | None) -> tuple[str, ...]:
    known = ("jit", *PARTS)
    if text is None:
        return () if torch.cuda.is_available() else known
    names = () if text == "off" else tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [name for name in names if name not in known]
    if unknown:
        raise CompatError(f"{ENVIRONMENT}: unknown part {unknown[0]!r}; known are {', '.join(known)}, or 'off'")
    return names
