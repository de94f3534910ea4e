"""Stand-ins for the services, over the real life cycle and broker but without a model: `python -m tests.e2e.fake_service`.

The trainer does everything that the streams would show of a run; the others live until the run ends. `TEST_FAULT` in the
environment makes one of them misbehave.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time

from shared.parent import die_with_parent
from shared.records import Announcement, Group, Receipt, Received, Samples, Sampling, floats, ints
from shared.service import Context, run_service

FAULT = os.environ.get("TEST_FAULT", "")
SERVICES = 5
STEP_S = float(os.environ.get("TEST_STEP_S", "0.05"))


async def idle(ctx: Context) -> None:
    if f"{ctx.replica}-fails" in FAULT:
        print("the disk of this test is full", file=sys.stderr, flush=True)
        raise SystemExit(1)
    if f"{ctx.replica}-crashes" in FAULT:
        os.kill(os.getpid(), signal.SIGSEGV)
    progress = 0
    while not ctx.stopping.is_set():
        progress += 1
        await ctx.beat("waiting", progress=progress)
        await ctx.sleep(0.2)
    print("drained", file=sys.stderr, flush=True)


async def train(ctx: Context) -> None:
    done = [receipt async for receipt in _receipts(ctx)]
    step = len(done) // ctx.config.groups_per_step
    await announce(ctx, step + 1, step)
    while len(await ctx.registry.alive()) < SERVICES and not ctx.stopping.is_set():
        await ctx.beat("waiting for the others")
        await ctx.sleep(0.1)
    while step < ctx.config.steps and not ctx.stopping.is_set():
        with ctx.metrics.busy():
            await asyncio.sleep(STEP_S)
        for number in range(ctx.config.groups_per_step):
            await train_group(ctx, step * ctx.config.groups_per_step + number, step)
        step += 1
        await announce(ctx, step + 1, step)
        ctx.metrics.emit(step=step, loss=0.5)
        await ctx.beat("training", progress=step, version=step + 1, step=step)
        if FAULT == "trainer-dies" and step == 2 and not done:
            os.kill(os.getpid(), signal.SIGKILL)
    if step >= ctx.config.steps:
        await ctx.kv.put("state", b"finished")


async def _receipts(ctx: Context):
    from shared.wire import decode

    async for data, _ in ctx.queue.read("receipts"):
        receipt = decode(data, Receipt)
        if receipt.kind == "trained":
            yield receipt


async def announce(ctx: Context, version: int, step: int) -> None:
    told = Announcement(
        version, step, ["w"], ["F32"], [[1]], ["s"], f"d{version}", None, [[0]], "", "step", time.time()
    )
    await ctx.queue.publish(ctx.subjects.announced, told, f"v{version}")
    held = Received("rollout-0", version, step, f"d{version}", "broadcast", {"transfer": 0.01}, True, "", time.time())
    await ctx.queue.publish(ctx.subjects.received, held, f"v{version}-rollout-0")


async def train_group(ctx: Context, issue: int, step: int) -> None:
    name, now = f"0-{issue}", time.time()
    samples = Samples(
        lengths=ints([2, 2]),
        ids=ints([1, 2, 3, 4]),
        logprobs=floats([0, 0, 0, 0]),
        mask=ints([1] * 4).astype("|u1"),
        finish=["stop"] * 2,
        texts=["a", "b"],
        span_sample=ints([0, 1]),
        span_start=ints([0, 0]),
        span_end=ints([2, 2]),
        span_version=ints([step + 1] * 2),
        span_step=ints([step] * 2),
    )
    group = Group(name, "train", issue, issue, 0, "p", "a", {}, Sampling(2, 2), samples=samples, replica="rollout-0")
    await ctx.queue.publish(ctx.subjects.receipts, Receipt("issued", name, issue, issue, at=now), f"issued:{name}")
    await ctx.queue.publish(ctx.subjects.trajectory(name), group, name)
    trained = Receipt(
        "trained", name, issue, issue, step=step, sample_steps=ints([step] * 2), tokens=4, reward=0.5, at=now
    )
    await ctx.queue.publish(ctx.subjects.receipts, trained, f"trained:{name}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("service")
    for option in ("--nats", "--run", "--replica"):
        parser.add_argument(option, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent)
    work = train if options.service == "trainer" else idle
    return run_service(options.service, work, nats_url=options.nats, run=options.run, replica=options.replica)


if __name__ == "__main__":
    raise SystemExit(main())
