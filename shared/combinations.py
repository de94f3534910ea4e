"""Combinations of the algorithm's options, and of these with the rest of the run file, that cannot work: each with the reason.

`conflicts` is called when a run file is read, so `slipstream validate` tells all of them at once, and nothing starts.
tests/shared/test_algorithms.py holds one example of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shared import columns
from shared.algorithms import (
    CispoConfig,
    DapoConfig,
    DecoupledPpoConfig,
    DrGrpoConfig,
    GspoConfig,
    PolicyOptions,
    PpoConfig,
    ReinforcePpBaselineConfig,
    ReinforcePpConfig,
    RlooConfig,
    SapoConfig,
)

if TYPE_CHECKING:
    from shared.config import RunConfig

ADVANTAGE_OF: dict[type[PolicyOptions], str] = {
    RlooConfig: "leave_one_out",
    ReinforcePpConfig: "returns",
    ReinforcePpBaselineConfig: "group",
    DrGrpoConfig: "group",
    PpoConfig: "gae",
}
"""Algorithms that are what they are by their advantage."""


def conflicts(run: RunConfig) -> Iterator[str]:
    """Each thing that cannot work, as a sentence that begins with the field."""
    yield from _advantages(run)
    yield from _corrections(run.algorithm)
    yield from _models(run)
    yield from _stages(run)
    yield from _kl(run.algorithm)
    yield from _own(run)
    yield from _engine(run)
    yield from _deterministic(run)
    if run.colocated:
        yield from _colocated(run)
    if run.dcs.cuda_ipc:
        yield from _cuda_ipc(run)


def _advantages(run: RunConfig) -> Iterator[str]:
    options = run.algorithm
    needed = ADVANTAGE_OF.get(type(options))
    if needed and options.advantage.name != needed:
        yield (
            f"algorithm.advantage.name: {options.name} computes {needed!r} advantages, not {options.advantage.name!r}; remove "
            "the field, or choose another algorithm"
        )
    if isinstance(options, DrGrpoConfig | ReinforcePpBaselineConfig) and options.advantage.scale != "none":
        yield (
            f"algorithm.advantage.scale: {options.name} does not divide by a deviation of the group, but it is "
            f"{options.advantage.scale!r}; remove the field, or choose grpo"
        )
    if options.advantage.name == "gae" and run.critic is None:
        yield "algorithm.advantage.name: 'gae' needs a critic's values; add the section `critic: {}`, or use 'returns'"
    if options.advantage.name != "gae" and run.critic is not None:
        yield f"critic: {options.name} with {options.advantage.name!r} advantages uses no values; remove the section"
    if options.reduction != "constant" and options.max_tokens not in (None, run.sampling.max_new_tokens):
        yield f"algorithm.max_tokens: only the reduction 'constant' divides by it, but it is {options.reduction!r}"


def _corrections(options: PolicyOptions) -> Iterator[str]:
    correction = options.correction
    # Weights of single tokens are merely without effect there, so the default correction may stand.
    if (correction.geometric is not None or correction.outlier is not None) and options.old_logprobs == "rollout":
        yield (
            "algorithm.correction: with old_logprobs 'rollout' the ratio itself holds all staleness and geometric and outlier "
            "would never leave out anything; set old_logprobs: trainer, or remove them"
        )
    if correction.low > min(correction.high, 1.0) or correction.high < 1.0:
        yield (
            f"algorithm.correction: [low, high] = [{correction.low}, {correction.high}] does not hold 1, the weight of a token "
            "on which engine and trainer agree"
        )
    for name in ("geometric", "outlier"):
        bounds = getattr(correction, name)
        if bounds is not None and not 0 <= bounds[0] <= 1 <= bounds[1]:
            yield f"algorithm.correction.{name}: {list(bounds)} does not hold 1, so every sequence would be left out"


def _models(run: RunConfig) -> Iterator[str]:
    options = run.algorithm
    if options.kl.coef > 0 and run.reference is None:
        yield "algorithm.kl.coef: needs a reference policy; add the section `reference: {}` (the initial weights)"
    if options.kl.coef == 0 and run.reference is not None:
        yield "reference: nothing uses it while algorithm.kl.coef is 0; set the coefficient, or remove the section"
    if options.distill.coef > 0 and run.teacher is None:
        yield (
            f"algorithm.distill.coef: {options.name} needs a teacher; add the section `teacher: {{path: ...}}`, or set it to 0"
        )
    if options.distill.coef == 0 and run.teacher is not None:
        yield "teacher: nothing uses it while algorithm.distill.coef is 0; set the coefficient, or remove the section"
    if options.distill.coef == 0 and options.distill.reward_weight == 0:
        yield "algorithm.distill: coef and reward_weight are both 0, so there is nothing to learn from"
    if run.teacher is not None:
        if options.distill.form == "top_k" and run.teacher.top_k == 0:
            yield "teacher.top_k: distill.form 'top_k' needs the teacher's likeliest tokens; set how many, such as 64"
        if options.distill.form == "sampled" and run.teacher.top_k > 0:
            yield "teacher.top_k: distill.form 'sampled' does not use them; set it to 0, or distill.form: top_k"


def _stages(run: RunConfig) -> Iterator[str]:
    roles = columns.stages(run)
    if roles and run.sampling.temperature != 1:
        inside = "" if roles == ["teacher"] else ", or use reference.place: trainer"
        yield (
            f"sampling.temperature: the {roles[0]}'s engine scores tokens at temperature 1, but the policy draws them at "
            f"{run.sampling.temperature}; set it to 1{inside}"
        )
    if "reference" in roles and run.deterministic and run.reference is not None and run.reference.refresh_every:
        yield (
            "reference.refresh_every: with deterministic: true the group must not depend on when another process takes the new "
            "reference; set it to 0, or reference.place: trainer"
        )


def _kl(options: PolicyOptions) -> Iterator[str]:
    kl = options.kl
    if kl.use == "reward" and kl.unbiased:
        yield "algorithm.kl.unbiased: concerns the loss term only; with kl.use 'reward' set it to false"
    if kl.coef > 0 and kl.use == "loss" and kl.estimator == "k1" and not kl.unbiased:
        yield (
            "algorithm.kl.estimator: the gradient of 'k1' as a loss is zero in expectation, so it restrains nothing; use 'k2' or "
            "'k3', set kl.unbiased: true, or kl.use: reward"
        )


def _engine(run: RunConfig) -> Iterator[str]:
    rollout = run.rollout
    if (rollout.engine == "external") != (rollout.url is not None):
        yield (
            "rollout.url: an external engine needs the address of its server, and only an external one has any use for it; "
            f"rollout.engine is {rollout.engine!r}"
        )
    if rollout.engine == "external" and rollout.replicas > 1 and "{" not in (rollout.url or "{"):
        yield (
            f"rollout.url: {rollout.replicas} replicas would share one server, whose weights and requests each takes for its "
            "own; name one for each with {replica} or {index}"
        )
    if rollout.engine == "external" and (roles := columns.stages(run)):
        yield f"rollout.engine: the {roles[0]} needs an engine that its service starts; use sglang or light"
    if run.deterministic and rollout.engine != "light":
        yield (
            "rollout.engine: deterministic: true needs samples that do not depend on what is drawn beside them, which only the "
            "light engine promises; use it"
        )
    if rollout.on_new_weights == "in_place" and not rollout.sglang_hooks:
        yield (
            "rollout.on_new_weights: 'in_place' with sglang_hooks: false would keep a cache of old weights for new requests; "
            "use 'retract' or 'abort'"
        )


def _deterministic(run: RunConfig) -> Iterator[str]:
    if run.deterministic and run.window > 1:
        yield (
            "window: with deterministic: true the trainer takes groups strictly in the order of issue; which one comes first "
            "inside a wider window is a matter of chance. Set it to 1"
        )


def _colocated(run: RunConfig) -> Iterator[str]:
    """What would have an engine awake in the trainer's turn, or elsewhere than on its device."""
    rollout, roles = run.rollout, columns.stages(run)
    if run.max_staleness > 0:
        yield (
            f"max_staleness: {run.max_staleness} lets groups of the next update be drawn while this one is trained on, but with "
            "placement: colocate the engines sleep then; set it to 0 or remove it, or use placement: separate"
        )
    if rollout.engine == "external":
        yield (
            "rollout.engine: with placement: colocate the replica has to know that its engine is on this device, and that it "
            "ends with it, which nobody knows of an external one; use sglang or light"
        )
    if not rollout.sglang_hooks:
        yield (
            "rollout.sglang_hooks: false leaves SGLang without the endpoint that takes tensors from shared memory, which "
            "placement: colocate needs; remove it"
        )
    if rollout.on_new_weights != "retract":
        yield (
            f"rollout.on_new_weights: with placement: colocate no request runs at a switch, so {rollout.on_new_weights!r} has no "
            "meaning; remove it"
        )
    if roles:
        inside = "use reference.place: trainer" if roles == ["reference"] else "use placement: separate"
        yield (
            f"placement: the {roles[0]}'s engine would hold the device in everybody's turn, as it does not take part in "
            f"colocation; {inside}"
        )
    if "auto" not in (run.trainer.device, rollout.device) and run.trainer.device != rollout.device:
        yield (
            f"rollout.device: {rollout.device!r}, but trainer.device is {run.trainer.device!r}; with placement: colocate they "
            "share one device, so both must be the same"
        )
    if run.controller.autoscale is not None:
        yield (
            "controller.autoscale: with placement: colocate the trainer always waits while samples are drawn, and more replicas "
            "share the same device, so there is nothing to decide by; remove the section"
        )


def _cuda_ipc(run: RunConfig) -> Iterator[str]:
    if not run.colocated:
        yield (
            "dcs.cuda_ipc: true, but only an engine on the trainer's own GPU can map its memory; set placement: colocate, or "
            "remove it"
        )
    for name, device in (("trainer", run.trainer.device), ("rollout", run.rollout.device)):
        if device == "cpu":
            yield f"dcs.cuda_ipc: true needs a GPU, but {name}.device is 'cpu'; set it to cuda or auto, or remove cuda_ipc"


def _own(run: RunConfig) -> Iterator[str]:
    options = run.algorithm
    if isinstance(options, DecoupledPpoConfig) and options.old_logprobs == "rollout":
        yield (
            "algorithm.old_logprobs: with 'rollout' the recent policy of decoupled_ppo is the one that sampled, so nothing is "
            "decoupled; use 'interpolated' or 'trainer', or choose grpo or ppo"
        )
    if isinstance(options, DapoConfig):
        if "zero_variance" not in run.reward.filters:
            yield (
                "reward.filters: dapo's dynamic sampling drops groups whose rewards are all equal; add 'zero_variance', or "
                "choose grpo, which is the same loss"
            )
        if options.overlong_buffer > run.sampling.max_new_tokens:
            yield (
                f"algorithm.overlong_buffer: {options.overlong_buffer} exceeds sampling.max_new_tokens = "
                f"{run.sampling.max_new_tokens}: even an empty completion would lose reward"
            )
    per_token = options.advantage.name in ("returns", "gae") or (
        options.distill.coef > 0 and options.distill.form == "sampled"
    )
    if per_token and isinstance(options, GspoConfig) and options.form == "sequence":
        yield "algorithm.form: advantages that differ by token need gspo's token form; set it to 'token'"
    if per_token and isinstance(options, SapoConfig) and options.level == "sequence":
        yield "algorithm.level: advantages that differ by token need a ratio by token; set it to 'token'"
    if isinstance(options, GspoConfig | SapoConfig | CispoConfig) and options.old_logprobs == "trainer":
        yield (
            "algorithm.old_logprobs: with one update a batch the ratio to the trainer's own log-probabilities is always 1, so "
            f"{options.name} would be a plain policy gradient; use 'rollout'"
        )
