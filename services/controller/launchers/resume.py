"""Going on with a run: which fields of its config may differ from the last start, and what happens to those that may not.

Pure but for `settle` and `register`, which write to the run's broker. `tests/controller/test_resume.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shared import config as run_config
from shared.config import ConfigError, RunConfig

if TYPE_CHECKING:
    from services.controller.attach import Run

MAY_CHANGE = (
    "steps",
    "base",
    "workdir",
    "heartbeat_ttl_s",
    "hang_timeout_s",
    "redeliver_after_s",
    "drain_timeout_s",
    "eval.every",
    "reward.replicas",
    "reward.workers",
    "reward.timeout_s",
    "reward.memory_mb",
    "reward.max_deliveries",
    "rollout.replicas",
    "rollout.max_running_groups",
    "rollout.on_new_weights",
    "rollout.request_timeout_s",
    "rollout.keep_after_s",
    "rollout.start_timeout_s",
    "rollout.max_deliveries",
    "rollout.threads",
    "teacher.replicas",
    "trainer.threads",
    "trainer.checkpoint",
    "trainer.megatron",  # checkpoints depend on no layout
    "trainer.rank_timeout_s",
    "trainer.ranks",
    "dcs.host",
    "dcs.port",
    "dcs.timeout_s",
    "dcs.bucket_mb",
    "dcs.keep_snapshots",
    "controller",
    "ray",
    "broker",
)
"""Fields, and sections with all that is in them, that neither the data, nor the policy, nor the staleness bound depend on."""


def changes(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """{path: (before, after)} of every field that differs."""
    old, new = flatten(before.model_dump(mode="json")), flatten(after.model_dump(mode="json"))
    return {path: (old.get(path), new.get(path)) for path in {**old, **new} if old.get(path) != new.get(path)}


def forbidden(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Those of `changes` that an existing run cannot follow."""
    found = changes(before, after)
    if after.broker.url and "workdir" in found:  # the streams would stay, the checkpoints would not
        return {"workdir": found["workdir"], **_not_allowed(found)}
    return _not_allowed(found)


def _not_allowed(found: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    return {
        path: values
        for path, values in found.items()
        if not any(path == allowed or path.startswith(f"{allowed}.") for allowed in MAY_CHANGE)
        and (path, *values) != ("deterministic", True, False)  # a promise can be given up, not made half way
    }


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Nested sections as dotted paths; lists are values."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    found = {}
    for key, item in value.items():
        found.update(flatten(item, f"{path}.{key}" if path else key))
    return found


def refuse(run: str, workdir: Any, found: dict[str, tuple[Any, Any]]) -> ConfigError:
    lines = "\n".join(f"  {path}: {old!r} before, {new!r} now" for path, (old, new) in found.items())
    return ConfigError(
        f"the run {run!r} exists already and cannot go on with another config:\n{lines}\n"
        f"Set these back, or start a new run under another name (--set run=NAME), or delete {workdir} to start this one over"
    )


@dataclass(slots=True, frozen=True)
class Before:
    """How an earlier start left the run. `state` is '' for a new run."""

    state: str = ""
    steps: int = 0

    def finished(self, steps: int) -> bool:
        """Whether there is nothing left to do: it came to its end, and no further steps are asked for."""
        return self.state == "finished" and steps <= self.steps


async def register(run: Run, config: RunConfig) -> Before:
    """Make the run known at its broker: config, streams, state. From then on services that were started anywhere find it."""
    before = await settle(run, config)
    await run.queue.ensure_streams(config)
    if not before.finished(config.steps):
        await run.set_state("running")
    return before


async def settle(run: Run, config: RunConfig) -> Before:
    """Write `config` into the run's bucket, if it may be."""
    entry = await run.kv.get("config")
    if entry is None:
        await run.kv.create("config", config.dump())
        return Before()
    before = run_config.loads(entry[0])
    if found := forbidden(before, config):
        raise refuse(config.run, config.work_path, found)
    if entry[0] != config.dump():
        await run.kv.update("config", config.dump(), entry[1])
    return Before(await run.state(), before.steps)
