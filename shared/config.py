"""One YAML file describes a run; this is its type. Torch-free, so that a run can be checked on any machine.

Unknown keys, wrong types and impossible combinations are refused with the field's path and a hint (`ConfigError`).
Each field is followed by its explanation. Native options of Megatron, SGLang and NATS pass through under their own names in
`trainer.megatron`, `rollout.sglang` and `broker.options`. Relative paths are relative to the run file, but for `workdir`, which
is made where the command is typed. `docs/run-file.md` is the reader's page.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from shared.algorithms import BY_NAME, AlgorithmConfig, GrpoConfig
from shared.combinations import conflicts
from shared.plugins import PluginError, find_function
from shared.section import Section
from shared.sections import (
    BrokerConfig,
    ControllerConfig,
    CriticConfig,
    DataConfig,
    DcsConfig,
    EvalConfig,
    ModelConfig,
    RayConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    TeacherConfig,
    TrainerConfig,
)
from shared.subjects import check_run_name


class ConfigError(ValueError):
    """The run file is wrong. The text names each field by its path and says what to do."""


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
    placement: Literal["separate", "colocate"] = "separate"
    """colocate: trainer and engines share a device and take turns on it (docs/colocate.md). Sets `max_staleness` to 0."""
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
    ray: RayConfig = RayConfig()
    """`slipstream up --launcher ray`."""
    broker: BrokerConfig = BrokerConfig()
    """The message broker."""
    heartbeat_ttl_s: float = Field(15.0, ge=2)
    """A replica that has not written its heartbeat for so long counts as gone; if its process still lives, it is replaced."""
    hang_timeout_s: float = Field(600.0, ge=2)
    """One computation of a service (a micro-batch, a checkpoint, loading the model) that takes longer counts as hung."""
    redeliver_after_s: float = Field(5.0, ge=1)
    """A prompt or a reward request whose holder has been silent for so long is delivered to another replica."""
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
        if self.colocated and "max_staleness" not in self.model_fields_set:
            self.max_staleness = 0
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
            raise ValueError(
                f"rollout.sglang: options given, but rollout.engine is {self.rollout.engine!r}; set rollout.engine: sglang"
            )
        if found := list(conflicts(self)):
            raise ValueError("\n  ".join(found))
        if self.algorithm.max_tokens is None:
            self.algorithm.max_tokens = self.sampling.max_new_tokens
        return self

    @property
    def colocated(self) -> bool:
        """Trainer and engines take turns on one device."""
        return self.placement == "colocate"

    @property
    def slots(self) -> int:
        """Groups that may be on the way at once. See docs/staleness.md for the proof."""
        return (self.max_staleness + 1) * self.groups_per_step - (self.window - 1)

    def replicas_of(self, role: str) -> int:
        """How many processes a stage of `shared.columns.stages` has."""
        return self.teacher.replicas if role == "teacher" and self.teacher is not None else 1

    def path(self, value: str) -> Path:
        """A path of the run file, made absolute; it may name `{run}` and `{seed}`."""
        return (Path(self.base) / value.format(run=self.run, seed=self.seed)).resolve()

    @property
    def work_path(self) -> Path:
        return Path(self.workdir)

    def function(self, dotted: str, field: str) -> Callable[..., Any]:
        """A user's function by dotted path; ConfigError names `field` if it cannot be had."""
        try:
            return find_function(dotted, self.base, field)
        except PluginError as error:
            raise ConfigError(str(error)) from error

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
