"""How SGLang is started: our defaults, the user's options over them, and what only a CPU gets. Without SGLang itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from services.rollout.engines import process
from services.rollout.engines.sglang import attention, command, standins
from services.rollout.engines.sglang.command import STANDINS, Settings


def launch(**options: Any) -> process.Launch:
    return process.sglang_command(Path("model"), options, "127.0.0.1")


def test_a_cpu_gets_what_sglang_needs_there() -> None:
    made = launch(device="cpu", threads=2, weight_version="3", dtype="float32")
    line = " ".join(made.argv)
    assert "-m services.rollout.engines.sglang.serve --model-path model" in line
    assert "--device cpu --attention-backend torch_native" in line
    assert "--weight-version 3 --dtype float32" in line
    assert "--skip-tokenizer-init" in made.argv
    assert "--disable-radix-cache" not in made.argv
    assert (made.env[STANDINS], made.env["OMP_NUM_THREADS"], made.env["SGLANG_USE_CPU_ENGINE"]) == ("1", "2", "1")
    assert made.url == f"http://127.0.0.1:{made.argv[made.argv.index('--port') + 1]}"


def test_a_gpu_starts_it_natively(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "GPU_DEVICES", (str(tmp_path),))
    for device in ("auto", "cuda"):
        made = launch(device=device, tp_size=2)
        assert STANDINS not in made.env
        assert "CUDA_VISIBLE_DEVICES" not in made.env
        assert "--attention-backend" not in made.argv
        assert made.argv[-2:] == ["--tp-size", "2"]
    assert command.on_cpu("auto") is False
    monkeypatch.setattr(command, "GPU_DEVICES", ())
    assert command.on_cpu("auto") is True


def test_the_users_options_win() -> None:
    made = launch(
        device="cpu", **{"max-total-tokens": 99, "attention_backend": "intel_amx", "skip_tokenizer_init": False}
    )
    assert made.argv[made.argv.index("--max-total-tokens") + 1] == "99"
    assert made.argv[made.argv.index("--attention-backend") + 1] == "intel_amx"
    assert made.argv.count("--max-total-tokens") == 1
    assert "--skip-tokenizer-init" not in made.argv
    assert launch(port=1234).url == "http://127.0.0.1:1234"


def test_keeping_the_cache_in_place_shares_no_prefixes() -> None:
    assert "--disable-radix-cache" in launch(device="cpu", in_place=True).argv


def test_without_hooks_it_is_sglang_itself() -> None:
    assert "sglang.launch_server" in launch(device="cuda", hooks=False).argv
    made = launch(device="cpu", hooks=False)  # the stand-ins are still needed
    assert (made.argv[2], made.env[command.HOOKS]) == (command.HOOKED, "0")
    assert command.HOOKS not in launch(device="cpu").env


def test_the_interpreter() -> None:
    assert command.interpreter("/opt/sglang/bin/python") == "/opt/sglang/bin/python"
    assert launch(python="/opt/sglang/bin/python").argv[0] == "/opt/sglang/bin/python"
    assert Settings().python is None


def test_a_missing_kernel_is_named_when_it_is_called() -> None:
    spec = standins.Finder().find_spec("sgl_kernel")
    assert spec is not None
    assert spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    with pytest.raises(RuntimeError, match="sgl_kernel.rmsnorm: SGLang has no build of its kernels for this CPU"):
        kernels.rmsnorm(1)
    assert not hasattr(kernels, "__path__"), "SGLang looks whether parts of it can be imported"
    assert standins.Finder().find_spec("sgl_kernel_of_somebody_else") is None


def test_one_padded_attention_call_is_the_loop_over_sequences() -> None:
    torch.manual_seed(0)
    heads, kv_heads, size, slots = 4, 2, 8, torch.arange(1, 61).view(3, 20)
    keys, values = torch.randn(2, 61, kv_heads, size)
    rows, lengths, cached = torch.tensor([2, 0, 1]), torch.tensor([7, 20, 1]), torch.tensor([3, 0, 0])
    new = lengths - cached
    query = torch.randn(int(new.sum()), heads, size)

    def expected(sequence: int, position: int, row: torch.Tensor) -> torch.Tensor:
        seen = slots[rows[sequence], : position + 1]
        k, v = (cache[seen].repeat_interleave(heads // kv_heads, 1) for cache in (keys, values))
        weights = (torch.einsum("hd,lhd->hl", row, k) * size**-0.5).softmax(-1)
        return torch.einsum("hl,lhd->hd", weights, v)

    def loop(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("SGLang's own loop was asked")

    options = {"scaling": size**-0.5, "enable_gqa": True}
    prefix = (keys, values, slots, rows, lengths)
    found = attention.extend(
        loop, None, query, torch.empty_like(query), *prefix, cached, new, None, causal=True, **options
    )
    places = [(s, int(cached[s]) + i) for s in range(3) for i in range(int(new[s]))]
    wanted = torch.stack([expected(s, position, row) for (s, position), row in zip(places, query, strict=True)])
    torch.testing.assert_close(found, wanted)
    last = torch.randn(3, heads, size)
    found = attention.decode(loop, None, last, torch.empty_like(last), *prefix, None, causal=False, **options)
    torch.testing.assert_close(found, torch.stack([expected(s, int(lengths[s]) - 1, last[s]) for s in range(3)]))
    with pytest.raises(AssertionError, match="own loop"):
        attention.decode(loop, None, last, torch.empty_like(last), *prefix, None, sliding_window_size=4, **options)
