"""One YAML file describes a run; this is its type. Torch-free, so that a run can be checked on any machine.

Unknown keys, wrong types and impossible combinations are refused with the field's path and a hint (`ConfigError`).
Each field is followed by its explanation. Native options of Megatron, SGLang and NATS pass through under their own names in
`trainer.megatron`, `rollout.sglang` and `broker.options`. Relative paths are relative to the run file, but for `workdir`, which
is made where the command is typed. `docs/run-file.md` is the reader's page.
"""

from __future__ import annotations

import difflib
import sys
import typing
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from shared.algorithms import BY_NAME, AlgorithmConfig, GrpoConfig
from shared.combinations import conflicts
from shared.section import Section
from shared.subjects import check_run_name


class ConfigError(ValueError):
    """The run file is wrong. The text names each field by its path and says what to do."""


class ModelConfig(Section):
    path: str
    """Hugging Face folder: config.json, tokenizer, safetensors. Written by `build` if it does not exist. May hold `{seed}`."""
    build: str | None = None
    """Dotted path of `build(path, seed)`, called once when `path` does not exist (tiny models made on the spot)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of the trainer and of the engine. float32 on a CPU: bfloat16 is several times slower there."""


class DataConfig(Section):
    source: str
    """A .jsonl or .parquet file, a dotted path of `prompts(seed, index) -> {prompt, answer, ...}`, or
    `reasoning_gym:NAME` for a procedural task of that package."""
    prompt_key: str = "prompt"
    """Field that holds the prompt: a string, or a list of chat messages."""
    answer_key: str = "answer"
    """Field handed to the reward as `answer`; a record without it gets None."""
    size: int | None = Field(None, ge=1)
    """Use the first `size` records; for a procedural source the number of prompts in an epoch."""
    shuffle: bool = True
    """Draw a new order each epoch, from the run's seed."""
    options: dict[str, Any] = Field({})
    """Passed to the procedural source."""
    system_prompt: str | None = None
    """Put in front of string prompts as a system message; the tokenizer's chat template is then used."""


class SamplingConfig(Section):
    temperature: float = Field(1.0, gt=0, le=5)
    """Sampling temperature. The trainer's log-probabilities are taken at the same temperature."""
    top_p: float = Field(1.0, ge=1, le=1)
    """Only 1: a truncated distribution renormalises log-probabilities that the trainer cannot reproduce."""
    max_new_tokens: int = Field(1024, ge=1)
    """Completion tokens at most; what is cut off there ends with finish `length`."""
    max_prompt_tokens: int = Field(4096, ge=1)
    """A longer prompt is dropped with reason `prompt_too_long`."""


class EvalConfig(Section):
    prompts: DataConfig | None = None
    """Held-out prompts. None: no evaluation."""
    every: int = Field(0, ge=0)
    """Steps between evaluations; 0: only before the first and after the last step."""
    samples: int = Field(1, ge=1)
    """Samples a prompt."""
    temperature: float = Field(0.0, ge=0, le=5)
    """0 is greedy."""
    min_reward: float | None = None
    """Refuse to train if the evaluation before the first step is below this: a policy that never succeeds learns nothing."""


class RewardFunction(Section):
    path: str
    """Dotted path of `reward(prompt, completion, answer, **context) -> float`, sync or async."""
    name: str | None = None
    """Name in metrics; the function's own by default."""
    weight: float = 1.0
    """Factor in the sum that is trained on."""
    options: dict[str, Any] = Field({})
    """Passed as keyword arguments."""


class RewardConfig(Section):
    functions: list[RewardFunction] = Field(min_length=1)
    """Their weighted sum is the reward."""
    workers: int = Field(1, ge=1)
    """Scoring processes of a reward replica."""
    timeout_s: float = Field(10.0, gt=0)
    """A call that takes longer is killed with its process; the sample counts as unscorable."""
    on_error: Literal["zero", "unscorable"] = "unscorable"
    """What a reward function that raises, returns NaN or runs out of time gives: reward 0, or no advantage for that sample."""
    filters: list[Literal["zero_variance", "truncated", "unscorable"]] = Field(["unscorable"])
    """Groups dropped before training, each a counted reason: all rewards equal; every sample cut off; no sample scored."""
    replicas: int = Field(1, ge=1)
    """Reward processes that `slipstream up` starts."""
    max_deliveries: int = Field(5, ge=1)
    """Tries before a group goes to the dead letters."""


class OptimizerConfig(Section):
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """From the peak down to `min_lr_ratio` over the run's steps."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Last learning rate as a share of the peak."""
    warmup_steps: int = Field(0, ge=0)
    """Linear from 0."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's."""
    eps: float = Field(1e-8, gt=0)
    """Adam's."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled (AdamW)."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest norm of the gradient; 0: no clipping."""


class WarmStartConfig(Section):
    source: str
    """A .jsonl file of {prompt, completion}, or a dotted path of `demonstrations(seed, index) -> {prompt, completion}`."""
    steps: int = Field(..., ge=1)
    """Supervised updates before reinforcement learning starts."""
    batch: int = Field(64, ge=1)
    """Demonstrations an update."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3, betas=(0.9, 0.98), schedule="linear", warmup_steps=30)
    """Its own; the moments are not carried over."""


class PreferencesConfig(Section):
    source: str
    """A .jsonl file of {prompt, chosen, rejected}, or a dotted path of `preferences(seed, index) -> {...}` with these keys."""
    steps: int = Field(..., ge=1)
    """Updates."""
    batch: int = Field(32, ge=1)
    """Pairs an update."""
    beta: float = Field(0.1, gt=0)
    """Strength of the hold on the policy that the phase begins with."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs that count the other way round (conservative DPO)."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6)
    """Its own; the moments are not carried over."""


class CheckpointConfig(Section):
    every: int = Field(10, ge=1)
    """Steps between checkpoints. What came after the last one is trained again from the queue if the trainer dies."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""


class TrainerConfig(Section):
    micro_batch_tokens: int = Field(8192, ge=1)
    """Token budget of a packed micro-batch; also the longest sequence that can be trained."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Of the policy."""
    warm_start: WarmStartConfig | None = None
    """A supervised phase of the same trainer before the first step."""
    preferences: PreferencesConfig | None = None
    """A preference phase (DPO) after it, before the first step."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save and what to keep."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    threads: int = Field(1, ge=1)
    """Torch threads on a CPU. More than one spins at barriers when the cores are shared."""
    megatron: dict[str, Any] = Field({})
    """Options of Megatron's TransformerConfig under their own names."""


class ReferenceConfig(Section):
    path: str | None = None
    """Hugging Face folder; None: the policy's initial weights. May hold `{seed}`."""
    place: Literal["service", "trainer"] = "service"
    """A process of its own, or inside the trainer's (hybrid: no message more, but the trainer waits for it)."""
    refresh_every: int = Field(0, ge=0)
    """Updates after which the reference becomes the policy of that moment; 0: never."""


class TeacherConfig(Section):
    path: str
    """Hugging Face folder with the policy's tokenizer. May hold `{seed}`."""
    replicas: int = Field(1, ge=1)
    """Teacher processes that `slipstream up` starts."""
    top_k: int = Field(0, ge=0)
    """The likeliest tokens that travel with each token; 0: only the sampled one's log-probability."""


class CriticConfig(Section):
    path: str | None = None
    """Hugging Face folder; None: the policy's initial weights. Its output layer gives one value."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """Of the critic."""
    warmup_steps: int = Field(0, ge=0)
    """Updates of the critic alone before the policy moves."""


class RolloutConfig(Section):
    replicas: int = Field(1, ge=1)
    """Rollout processes that `slipstream up` starts."""
    engine: Literal["light", "sglang"] = "light"
    """light: a small batched sampler on plain torch with SGLang's HTTP API; sglang: SGLang itself."""
    max_running_groups: int = Field(16, ge=1)
    """Prompt groups that a replica works on at once; it never holds more than these."""
    on_new_weights: Literal["retract", "in_place"] = "retract"
    """Running requests at a switch: recompute their KV cache under the new weights, or keep it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine runs."""
    threads: int = Field(1, ge=1)
    """Torch threads of a CPU engine."""
    request_timeout_s: float = Field(600.0, gt=0)
    """Deadline of one generate request."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Deadline of the engine's start."""
    max_deliveries: int = Field(5, ge=1)
    """Tries before a prompt goes to the dead letters."""
    light: dict[str, Any] = Field({})
    """Options of the light engine's command line, without the dashes."""
    sglang: dict[str, Any] = Field({})
    """Options of `sglang.launch_server` under their own names."""


class DcsConfig(Section):
    host: str = "127.0.0.1"
    """Address that the DCS listens on and that others reach it at."""
    port: int = Field(0, ge=0, le=65535)
    """0: a free one; it is told through the registry."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Transport of the broadcast group."""
    timeout_s: float = Field(60.0, gt=0)
    """Deadline of one broadcast, joining included; whoever misses it is left out and pulls."""
    bucket_mb: int = Field(64, ge=1)
    """Tensors are sent in buckets of about this size."""
    keep_snapshots: int = Field(3, ge=2)
    """Newest snapshots kept for newcomers."""


class ControllerConfig(Section):
    host: str = "127.0.0.1"
    """Address of the REST API."""
    port: int = Field(0, ge=0, le=65535)
    """0: a free one; it is told through the registry."""


class BrokerConfig(Section):
    url: str | None = None
    """nats://host:port of a broker with JetStream. None: `slipstream up` starts a private one on loopback."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the private broker; 0: a free one."""
    max_bytes: int = Field(4 << 30, ge=64 << 20)
    """Disk that the run's streams may take together."""
    durability: Literal["process", "power"] = "process"
    """process: survives the death of any process. power: every write is synced to disk, about 5 times slower."""
    options: dict[str, Any] = Field({})
    """Further options of the private nats-server under their own names."""


class RunConfig(Section):
    """A whole run. `load(path)` reads it."""

    run: Annotated[str, Field(description="Name of the run: the first token of every subject.")]
    seed: int = 0
    """Prompt order, sampling, initial weights."""
    steps: int = Field(..., ge=1)
    """Updates of the policy until the run ends."""
    groups_per_step: int = Field(..., ge=1)
    """Prompt groups trained in one update (P)."""
    samples_per_group: int = Field(..., ge=2)
    """Completions of one prompt (G)."""
    max_staleness: int = Field(1, ge=0)
    """No token is older than this many updates when it is trained on (S). 0 is synchronous training."""
    window: int = Field(1, ge=1)
    """How far the trainer may look past a group that is not finished (W). 1: strictly in the order of issue."""
    deterministic: bool = False
    """Two runs of a seed end in the same weights, bit for bit, killed or not. Needs `window: 1`, and functions of yours that
    depend on their arguments only."""
    workdir: str = "runs/{run}"
    """Checkpoints, snapshots, logs and the private broker's store. Relative to where the command is typed."""
    model: ModelConfig
    """The policy."""
    prompts: DataConfig
    """What is trained on."""
    sampling: SamplingConfig = SamplingConfig()
    """How completions are drawn."""
    eval: EvalConfig = EvalConfig()
    """Held-out evaluation."""
    reward: RewardConfig
    """Scores."""
    algorithm: AlgorithmConfig = GrpoConfig()
    """Loss and advantages. `name` chooses the algorithm and with it the options."""
    reference: ReferenceConfig | None = None
    """The policy that `algorithm.kl` holds on to."""
    teacher: TeacherConfig | None = None
    """The model that `algorithm.distill` learns from."""
    critic: CriticConfig | None = None
    """The values that `gae` advantages are made from."""
    trainer: TrainerConfig = TrainerConfig()
    """The trainer service."""
    rollout: RolloutConfig = RolloutConfig()
    """The rollout service."""
    dcs: DcsConfig = DcsConfig()
    """The weights service."""
    controller: ControllerConfig = ControllerConfig()
    """The controller service."""
    broker: BrokerConfig = BrokerConfig()
    """The message broker."""
    heartbeat_ttl_s: float = Field(15.0, ge=2)
    """A replica that has not written its heartbeat for so long counts as gone; if its process still lives, it is replaced."""
    hang_timeout_s: float = Field(600.0, ge=2)
    """One computation of a service (a micro-batch, a checkpoint, loading the model) that takes longer counts as hung."""
    drain_timeout_s: float = Field(30.0, gt=0)
    """What a stopping service may take to finish what it holds; the rest is delivered again to others."""
    base: str = "."
    """Folder of the run file: relative paths start here and plug-ins are imported from here. Set by `load`."""

    @field_validator("run")
    @classmethod
    def _run_name(cls, value: str) -> str:
        return check_run_name(value)

    @model_validator(mode="after")
    def _combinations(self) -> RunConfig:
        if self.window > self.max_staleness * self.groups_per_step + 1:
            raise ValueError(
                f"window: {self.window} exceeds max_staleness * groups_per_step + 1 = "
                f"{self.max_staleness * self.groups_per_step + 1}; a wider one could leave the trainer without a full batch"
            )
        longest = self.sampling.max_prompt_tokens + self.sampling.max_new_tokens
        if longest > self.trainer.micro_batch_tokens:
            raise ValueError(
                f"trainer.micro_batch_tokens: {self.trainer.micro_batch_tokens} is less than sampling.max_prompt_tokens + "
                f"max_new_tokens = {longest}; a sequence is never split, so raise the one or lower the others"
            )
        if self.eval.min_reward is not None and self.eval.prompts is None:
            raise ValueError("eval.min_reward: needs eval.prompts, the held-out prompts to measure it on")
        if self.rollout.sglang and self.rollout.engine != "sglang":
            raise ValueError("rollout.sglang: options given, but rollout.engine is 'light'; set rollout.engine: sglang")
        if found := list(conflicts(self)):
            raise ValueError("\n  ".join(found))
        if self.algorithm.max_tokens is None:
            self.algorithm.max_tokens = self.sampling.max_new_tokens
        return self

    @property
    def slots(self) -> int:
        """Groups that may be on the way at once. See docs/staleness.md for the proof."""
        return (self.max_staleness + 1) * self.groups_per_step - (self.window - 1)

    def path(self, value: str) -> Path:
        """A path of the run file, made absolute; it may name `{run}` and `{seed}`."""
        return (Path(self.base) / value.format(run=self.run, seed=self.seed)).resolve()

    @property
    def work_path(self) -> Path:
        return Path(self.workdir)

    def function(self, dotted: str, field: str) -> Callable[..., Any]:
        """A user's function by dotted path; ConfigError names `field` if it cannot be had."""
        module, _, name = dotted.rpartition(".")
        if not module:
            raise ConfigError(f"{field}: {dotted!r} is no dotted path; write module.function")
        if self.base not in sys.path:
            sys.path.append(self.base)
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{field}: cannot import {dotted!r} ({error}); modules are looked for beside the run file"
            ) from error
        if not callable(found):
            raise ConfigError(f"{field}: {dotted!r} is not a function")
        return found

    def dump(self) -> bytes:
        """The resolved config as it is kept in the run's KV bucket."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True).encode()


def load(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a run file; `overrides` are `a.b=value` with YAML values. Raises ConfigError."""
    path = Path(path)
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the run file ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    data = _yaml(text, str(path))
    for override in overrides or []:
        _override(data, override)
    data.setdefault("base", str(path.resolve().parent))
    config = parse(data, str(path))
    config.workdir = str(Path(config.workdir.format(run=config.run)).resolve())
    return config


def loads(dumped: bytes) -> RunConfig:
    """The config that `RunConfig.dump` wrote."""
    return parse(_yaml(dumped.decode(), "the run's config"), "the run's config")


def parse(data: dict[str, Any], source: str) -> RunConfig:
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        lines = "\n".join(f"  {_explain(item)}" for item in error.errors())
        raise ConfigError(f"{source} is not a valid run file:\n{lines}") from error


def _yaml(text: str, source: str) -> dict[str, Any]:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected fields at the top level, such as `run:` and `steps:`")
    return data


def _override(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override!r}: write it as a.b=value")
    *parents, last = key.strip().split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is a value, not a section")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not YAML ({error})") from error
    if isinstance(parsed, str) and _is_number(parsed):
        parsed = float(parsed)  # YAML 1.1 reads 1e-4 as text
    data[last] = parsed


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _explain(item: Any) -> str:
    location = tuple(
        part for part in item["loc"] if part not in BY_NAME
    )  # pydantic puts the chosen algorithm into the path
    path = ".".join(str(part) for part in location) or "run file"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        return f"{path}: unknown field{_suggest(item['loc'])}"
    if item["type"] == "missing":
        return f"{path}: missing; it has no default"
    if item["type"] == "union_tag_invalid":
        return f"{path}.name: no algorithm is called {item['ctx']['tag']!r}{_close(item['ctx']['tag'], BY_NAME)}"
    if path == "run file":
        return message
    return f"{path}: {message} (got {item['input']!r})"


def _suggest(location: tuple[str | int, ...]) -> str:
    section: Any = RunConfig
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        section = BY_NAME.get(part) or next(iter(sections_of(section.model_fields[part].annotation)), None)
        if section is None:
            return ""
    return _close(str(location[-1]), section.model_fields)


def _close(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"


def sections_of(annotation: Any) -> list[type[Section]]:
    """The sections that a field may hold: none for a plain value, several for the algorithm."""
    candidates = (annotation, *typing.get_args(annotation))
    return [kind for kind in candidates if isinstance(kind, type) and issubclass(kind, Section)]
