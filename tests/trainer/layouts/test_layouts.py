"""Every layout of ranks computes what one process computes: losses, gradients, two GRPO updates, exported weights, and a resume.

One launch of torchrun for all layouts of two ranks and one for all of four: gloo on the CPU, float32. Sums over a micro-batch are
compared as means over its tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.ranks import RankedPolicy
from tests.trainer.layouts.measure import (
    CRITIC,
    STATES,
    means,
    measure,
    measure_critic,
    numbers,
    resume,
    run_config,
    tensors,
    transformers_logprobs,
    update,
)
from tests.trainer.models import build_model

TOLERANCES = {"float32": (1e-6, 1e-6), "bfloat16": (2e-2, 1e-2)}
"""(absolute, relative). bfloat16 has 8 bits, and a cut matrix product rounds in other places."""
TIMEOUT_S = 1800
"""Two minutes on two busy cores."""

T, P, C = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
E, ET, V = "expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"
SP, DO = {"sequence_parallel": True}, {"use_distributed_optimizer": True}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

LAYOUTS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    2: {
        "tp2": ("qwen3", {T: 2}),
        "tp2-sp": ("qwen3", {T: 2, **SP}),
        "tp2-recompute": ("qwen3", {T: 2, **RECOMPUTE}),
        "pp2": ("qwen3", {P: 2}),
        "pp2-virtual": ("qwen3", {P: 2, V: 2}),
        "dp2": ("qwen3", {}),
        "dp2-distopt": ("qwen3", DO),
        "cp2": ("qwen3", {C: 2}),
        "cp2-distopt": ("qwen3", {C: 2, **DO}),
        "tp2-sp-experts": ("qwen3_moe", {T: 2, **SP}),
        "ep2": ("qwen3_moe", {E: 2}),
        "ep2-distopt": ("qwen3_moe", {E: 2, **DO}),
        "dp2-bfloat16": ("qwen3-bfloat16", {}),
        "dp2-distopt-bfloat16": ("qwen3-bfloat16", DO),
        "tp2-bfloat16": ("qwen3-bfloat16", {T: 2}),
    },
    4: {
        "tp2-pp2": ("qwen3", {T: 2, P: 2, **SP}),
        "tp2-dp2": ("qwen3", {T: 2}),
        "pp2-dp2": ("qwen3", {P: 2}),
        "pp2-dp2-distopt": ("qwen3", {P: 2, **DO}),
        "cp2-tp2": ("qwen3", {C: 2, T: 2, **SP}),
        "ep2-pp2": ("qwen3_moe", {E: 2, P: 2}),
        "ep2-cp2": ("qwen3_moe", {E: 2, C: 2}),
        "ep2-etp2": ("qwen3_moe", {E: 2, T: 2, ET: 2, **SP}),
        "ep2-tp2": ("qwen3_moe", {E: 2, T: 2, ET: 1, **SP, **DO}),
    },
}
REFERENCES = {"qwen3": "float32", "qwen3_moe": "float32", "qwen3-bfloat16": "bfloat16"}
"""What one process makes of each model and type."""
ALL = [(ranks, name) for ranks, layouts in LAYOUTS.items() for name in layouts]
FAMILIES = ("qwen2", "llama", "qwen3", "qwen3_moe")
CRITIC_LAYOUTS = ("tp2", "tp2-sp", "pp2", "dp2-distopt", "cp2")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several ranks are tried on Linux only")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and what one process makes of them."""
    from services.trainer.build import build

    root = tmp_path_factory.mktemp("layouts")
    for family in FAMILIES:
        build_model(root / family, family, tied=family == "qwen3")
    for reference, dtype in REFERENCES.items():
        out = root / "results" / reference
        out.mkdir(parents=True)
        measure(build(run_config(root / model_of(reference), 1, {}, dtype)), out)
    (root / "results/critic").mkdir()
    measure_critic(build(run_config(root / "qwen3", 1, {})), root / "results/critic")
    return root


@pytest.fixture(scope="module")
def launched(root: Path) -> Callable[[int], Path]:
    """`launched(ranks)`: the results of all layouts of so many ranks, by one launch."""
    done: dict[int, str] = {}

    def launch(ranks: int) -> Path:
        if ranks not in done:
            done[ranks] = ""
            layouts = {
                name: plan_of(model_of(reference), megatron, "updates", reference)
                for name, (reference, megatron) in LAYOUTS[ranks].items()
            }
            if ranks == 2:
                layouts |= {
                    f"{family}-logprobs": plan_of(family, {T: 2, **(SP if family == "qwen3_moe" else {})}, "logprobs")
                    for family in FAMILIES
                }
                layouts |= {
                    f"{name}-critic": plan_of("qwen3", LAYOUTS[2][name][1], "critic") for name in CRITIC_LAYOUTS
                }
            done[ranks] = torchrun(ranks, json.dumps({"ranks": ranks, "layouts": layouts}), str(root))
        assert not done[ranks], done[ranks]
        return root / "results"

    return launch


def model_of(reference: str) -> str:
    return reference.partition("-")[0]


def plan_of(model: str, megatron: dict[str, Any], what: str, reference: str = "qwen3") -> dict[str, Any]:
    """What the worker is told of a layout."""
    dtype = REFERENCES[reference]
    return {"model": model, "megatron": megatron, "what": what, "dtype": dtype, "reference": reference}


def torchrun(ranks: int, *arguments: str) -> str:
    """Why it failed, or nothing."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launcher += ["--nproc-per-node", str(ranks)]
    found = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.trainer.layouts.worker", *arguments],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return f"done: {found.stdout}\n{found.stderr}" if found.returncode else ""


@pytest.mark.parametrize(("ranks", "name"), ALL, ids=[name for _, name in ALL])
def test_a_layout_computes_what_one_process_computes(
    ranks: int, name: str, launched: Callable[[int], Path], root: Path
) -> None:
    results, model = launched(ranks), LAYOUTS[ranks][name][0]
    ours, reference = results / name, results / model
    allowed, relative = TOLERANCES[REFERENCES[model]]
    for what, tolerance in (("loaded", 0.0), ("gradients", allowed), ("trained", allowed)):
        found, expected = tensors(ours, what), tensors(reference, what)
        assert found.keys() == expected.keys()
        for tensor in expected:
            torch.testing.assert_close(found[tensor], expected[tensor], rtol=0, atol=tolerance, msg=f"{what} {tensor}")
    found, expected = numbers(ours), numbers(reference)
    for phase in ("first", "second", "third", "resumed"):
        assert means(found[phase]) == pytest.approx(means(expected[phase]), rel=5 * relative, abs=allowed), phase
    for total in ("logprob_sum", "entropy_sum", "top_sum"):
        assert found[total] == pytest.approx(expected[total], rel=relative), total


@pytest.mark.parametrize(("ranks", "name"), ALL, ids=[name for _, name in ALL])
def test_one_process_goes_on_from_a_checkpoint_of_any_layout(
    ranks: int, name: str, launched: Callable[[int], Path], root: Path, policies: Callable[[str], RankedPolicy]
) -> None:
    results, model = launched(ranks), LAYOUTS[ranks][name][0]
    allowed, relative = TOLERANCES[REFERENCES[model]]
    policy = policies(model)
    resume(policy, results / name)
    expected = numbers(results / model)["third"]
    assert means(update(policy, seed=7)) == pytest.approx(means(expected), rel=5 * relative, abs=allowed)


@pytest.fixture(scope="module")
def policies(root: Path) -> Callable[[str], RankedPolicy]:
    """One policy of one process for each model, used again."""
    from services.trainer.build import build

    built: dict[str, RankedPolicy] = {}

    def get(reference: str) -> RankedPolicy:
        if reference not in built:
            built[reference] = build(run_config(root / model_of(reference), 1, {}, REFERENCES[reference]))
        return built[reference]

    return get


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_two_ranks_are_those_of_transformers(
    family: str, launched: Callable[[int], Path], root: Path
) -> None:
    ours = tensors(launched(2) / f"{family}-logprobs", "logprobs")["logprobs"]
    torch.testing.assert_close(ours, transformers_logprobs(root / family), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CRITIC_LAYOUTS)
def test_a_critic_beside_the_policy_is_that_of_one_process(
    name: str, launched: Callable[[int], Path], root: Path, policies: Callable[[str], RankedPolicy]
) -> None:
    ours, reference = launched(2) / f"{name}-critic", root / "results/critic"
    assert means(numbers(ours)) == pytest.approx(means(numbers(reference)), rel=5e-6, abs=1e-6)
    found, expected = tensors(ours, "trained"), tensors(reference, "trained")
    assert found.keys() == expected.keys()
    for tensor in expected:
        torch.testing.assert_close(found[tensor], expected[tensor], rtol=0, atol=1e-6, msg=tensor)
    policy = policies("qwen3")
    if CRITIC not in policy.ranks.models:
        policy.ranks.add(CRITIC, root / "qwen3", "critic")
    for model, prefix in STATES.items():
        policy.ranks.models[model].restore(ours / "checkpoints/checkpoint-00000001-step-00000003", prefix)
    saved = dict(policy.ranks.models[CRITIC].hf_tensors())
    assert all(torch.equal(saved[tensor], found[tensor]) for tensor in found)
