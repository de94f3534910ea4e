"""An engine that runs elsewhere: an SGLang server that was registered by URL, and that this worker attends to.

The scale operation that registered it names the URL in the record of wanted replicas, or the run file does so for all of them
(`rollout.engine: external`). The engine is given the newest verified weights by path (it must see the folder: the same host or a
shared file system), and takes part in broadcasts from then on. One that cannot be reached at first, or that serves another model,
is a ConfigError: this worker ends and the operation fails with its words. One that goes away later is waited for, since whoever
runs it brings it back. tests/rollout/test_elsewhere.py.
"""

from __future__ import annotations

import logging
import re

from services.rollout.engine_weights import EngineWeights, WeightsRefused
from services.rollout.engines.client import EngineClient, EngineDead, EngineError
from services.rollout.weights import Start
from shared import wanted
from shared.config import ConfigError
from shared.service import Context

log = logging.getLogger(__name__)

REACH_S = 10.0
POLL_S = 0.5
STATE = "waiting for engine"


async def engine_url(ctx: Context) -> str:
    """Where this replica's engine runs; '' if it is to start one of its own. Raises ConfigError."""
    record = wanted.load(await ctx.kv.get(wanted.KEY))
    url: str = record.replicas.get(ctx.replica, {}).get("engine_url", "")
    return url or url_of(ctx.config.rollout.url or "", ctx.replica)


def url_of(pattern: str, replica: str) -> str:
    """`rollout.url` for one replica."""
    number = re.search(r"(\d+)$", replica)
    try:
        return pattern.format(replica=replica, index=number.group(1) if number else "")
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"rollout.url: {pattern!r} may hold {{replica}} and {{index}} only") from error


async def reach(ctx: Context, url: str, *, again: bool) -> bool:
    """Wait until the engine answers, for ever if it was there before (`again`). False: the service is to stop. Raises
    ConfigError."""
    waited = 0.0
    async with EngineClient(url, timeout_s=REACH_S / 2) as engine:
        while not ctx.stopping.is_set():
            if await ctx.vouch(engine.healthy()):
                return True
            if not again and waited >= REACH_S:
                raise ConfigError(
                    f"the engine at {url} cannot be reached; is it running, and is its port open to this host?"
                )
            await ctx.beat(STATE)
            await ctx.sleep(POLL_S)
            waited += POLL_S
    return False


async def give_weights(ctx: Context, engine: EngineClient, start: Start) -> None:
    """Make it serve `start`. Raises ConfigError if it serves another model, EngineDead if it is gone."""
    tensors = start.manifest.tensors
    try:
        weights, held = await EngineWeights.of(engine, ctx.config.rollout.on_new_weights, tensors)
        if weights.verifiable and (strange := sorted(held.keys() ^ {spec.name for spec in tensors})):
            raise ConfigError(
                f"the engine at {engine.url} serves another model: {len(strange)} tensors are only there or only here, "
                f"{strange[0]} first"
            )
        await ctx.vouch(weights.load(start.folder, start.version, tensors, {}))
    except EngineDead:
        raise
    except (EngineError, WeightsRefused) as error:
        raise ConfigError(
            f"the engine at {engine.url} did not take version {start.version} from {start.folder}: {error}. It must serve the "
            "run's model in model.dtype, and see that folder (the same host, or a shared file system)"
        ) from error
