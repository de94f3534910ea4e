"""Everything about a run that can be checked before it starts, without a GPU and without torch.

`problems` returns every finding at once, each naming the field and the fix; a run file that passes can still fail, but not for
a reason that was there to be seen. `tests/e2e/test_cli.py` holds the texts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.reward.scoring import FunctionError, load
from services.trainer.layout import LayoutError, layout_of
from services.trainer.model_folder import ModelFolderError, check_same_vocabulary, read_architecture
from shared.config import ConfigError, RunConfig
from shared.sections import DataConfig, RewardFunction

FIRST_RECORDS = 4


def problems(config: RunConfig) -> list[str]:
    """What would stop this run; an empty list if nothing was found."""
    found: list[str] = []
    checks: list[Callable[[], None]] = [
        lambda: check_model(config),
        lambda: check_prompts(config, config.prompts, "prompts"),
        lambda: check_warm_start(config),
        lambda: check_preferences(config),
        lambda: check_other_models(config),
    ]
    if config.eval.prompts is not None:
        held_out = config.eval.prompts
        checks.append(lambda: check_prompts(config, held_out, "eval.prompts"))
    for number, function in enumerate(config.reward.functions):
        checks.append(lambda number=number, function=function: check_reward(config, function, number))  # type: ignore[misc]
    for check in checks:
        try:
            check()
        except (ConfigError, ModelFolderError, LayoutError, FunctionError) as error:
            found.append(str(error))
    return found


def check_model(config: RunConfig) -> None:
    """The folder holds a family that the trainer knows, or a function will build it, and the ranks can share it."""
    folder = config.path(config.model.path)
    if (folder / "config.json").is_file():
        layout_of(config.trainer.megatron, config.trainer.ranks, read_architecture(folder))
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise ConfigError(f"model.path: {folder} holds no tokenizer.json")
        return
    if config.model.build is None:
        raise ConfigError(
            f"model.path: {folder} holds no config.json; download a Hugging Face folder there, or set model.build to a function"
        )
    layout_of(config.trainer.megatron, config.trainer.ranks)
    takes(config.function(config.model.build, "model.build"), "model.build", ("path", "seed"))


def check_other_models(config: RunConfig) -> None:
    """The folders of teacher, reference and critic can be read, and share the policy's vocabulary."""
    policy = config.path(config.model.path)
    sections = {"teacher": config.teacher, "reference": config.reference, "critic": config.critic}
    for name, section in sections.items():
        if section is None or section.path is None:
            continue
        folder = config.path(section.path)
        try:
            read_architecture(folder)
            if (policy / "config.json").is_file():
                check_same_vocabulary(policy, folder)
        except ModelFolderError as error:
            raise ConfigError(f"{name}.path: {error}") from error


def check_prompts(config: RunConfig, data: DataConfig, field: str) -> None:
    """The first records can be read and hold a prompt."""
    from services.controller.prompts import PromptSource

    source = PromptSource(config, data, field)
    for index in range(min(FIRST_RECORDS, source.size or FIRST_RECORDS)):
        source.record(index)


def check_reward(config: RunConfig, reward: RewardFunction, number: int) -> None:
    """It can be called with what the reward service hands it."""
    load(reward.path, reward.options, config.base, f"reward.functions.{number}")


def check_warm_start(config: RunConfig) -> None:
    """The first demonstration has a prompt and a completion."""
    if (warm := config.trainer.warm_start) is not None:
        check_records(config, warm.source, "trainer.warm_start.source", ("prompt", "completion"))


def check_preferences(config: RunConfig) -> None:
    """The first pair has a prompt and both completions."""
    if (prefer := config.trainer.preferences) is not None:
        check_records(config, prefer.source, "trainer.preferences.source", ("prompt", "chosen", "rejected"))


def check_records(config: RunConfig, source: str, field: str, keys: tuple[str, ...]) -> None:
    """The file is there, or the function's first record has these keys."""
    if source.endswith(".jsonl"):
        if not Path(config.path(source)).is_file():
            raise ConfigError(f"{field}: no file {config.path(source)}")
        return
    function = config.function(source, field)
    takes(function, field, ("seed", "index"))
    record = call(function, field, config.seed, 0)
    if not isinstance(record, dict) or not set(keys) <= set(record):
        expected = ", ".join(f"{key!r}: ..." for key in keys)
        raise ConfigError(f"{field}: {source}(seed, 0) returned {record!r}, expected {{{expected}}}")


def takes(function: Callable[..., Any], field: str, arguments: tuple[str, ...]) -> None:
    """ConfigError unless `function` can be called with these, in this order."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without a signature: only calling it could tell
    try:
        signature.bind(*arguments)
    except TypeError as error:
        name = getattr(function, "__name__", str(function))
        raise ConfigError(
            f"{field}: {name}{signature} cannot be called with ({', '.join(arguments)}): {error}"
        ) from error


def call(function: Callable[..., Any], field: str, *arguments: Any) -> Any:
    """The user's function, its own error told under the field's name."""
    try:
        return function(*arguments)
    except Exception as error:  # whatever a user's function raises is a finding
        raise ConfigError(f"{field}: calling it with {arguments} raised {type(error).__name__}: {error}") from error


def key_facts(config: RunConfig) -> dict[str, str]:
    """The resolved config as a person reads it."""
    functions = ", ".join(f"{one.path} x {one.weight:g}" for one in config.reward.functions)
    return {
        "run": f"{config.run} (seed {config.seed})",
        "steps": f"{config.steps} updates of {config.groups_per_step} groups x {config.samples_per_group} samples",
        "staleness": f"no trained token is older than {config.max_staleness} updates"
        + (": synchronous training" if config.max_staleness == 0 else ""),
        "slots": f"{config.slots} groups on the way at once (window {config.window})",
        "model": f"{config.path(config.model.path)}"
        + (f", built by {config.model.build}" if config.model.build else ""),
        "prompts": config.prompts.source + (f", the first {config.prompts.size}" if config.prompts.size else ""),
        "reward": functions,
        "algorithm": f"{config.algorithm.name}, advantages {config.algorithm.advantage.name}",
        "rollout": f"{config.rollout.replicas} x {config.rollout.engine} engine",
        "broker": config.broker.url or "private, started by `slipstream up`",
        "workdir": str(config.work_path),
    }
