"""Seconds from SIGKILL to useful work again, for each service of the example run, and what was done twice because of it.

    python -m benchmarks.recovery [--rounds 3] [--part rollout-0 ...]

`slipstream up` on the example with one rollout replica and the light engine; each part is killed `--rounds` times, in turns,
when the run has got over the kill before. Nobody helps: what is measured is the supervision of `up` and the services' own start.
**Useful work** is the first thing that the new process left in the streams, dated by itself (all clocks are this host's):

    rollout-0, engine    a group that it began and finished to sample after the kill
    reward-0             a group that it scored
    controller-0         an `issued` receipt
    dcs-0                an announced version
    trainer-0            a `trained` receipt
    broker               a `trained` receipt

`stood_still_s` is the longest pause of the run itself, between two updates that had not been done before the kill: what the dead
one had in hands comes again only after `redeliver_after_s` (5 s), and training goes strictly in the order of issue.
`redelivered` counts these messages (a rollout's are drawn again, a reward's scored again); `trained_again` counts groups of
updates that the last checkpoint did not hold; the example saves one every 20 updates. Aim: every kill of rollout, reward,
controller and DCS under 5 s to work again; the trainer is bounded by its own start and by loading its checkpoint.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from services.controller.attach import Run
from shared import wire
from shared.records import Announcement, Event, Group, Receipt
from tests.chaos.system import System
from tests.shared.runs import until

PARTS = ("rollout-0", "engine", "reward-0", "controller-0", "dcs-0", "trainer-0", "broker")
AIMED = ("rollout-0", "reward-0", "controller-0", "dcs-0")
AIM_S = 5.0
SETS = ("trainer.warm_start=null", "eval.prompts=null", "rollout.replicas=1", "steps=5000")
WARM_UPDATES = 25
"""Before the first kill: there is a checkpoint then."""
QUIET_UPDATES = 8
"""Between two kills, with all parts at work."""
DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL, when its victim was gone for certain, and when the next one came."""

    part: str
    at: float
    gone: float
    until: float


@dataclass(slots=True)
class Records:
    """What the run left in its streams."""

    groups: list[Group]
    receipts: list[Receipt]
    announced: list[Announcement]
    events: list[Event]


@dataclass(frozen=True, slots=True)
class Recovery:
    """What one kill cost."""

    again_s: float
    restart_s: float
    """Until `up` had started its process again (0: an engine and the broker are not services)."""
    stood_still_s: float
    redelivered: int
    trained_again: int


class Updates:
    """Follows the `trained` receipts."""

    def __init__(self, run: Run) -> None:
        self._run, self._newest, self._news = run, 0, asyncio.Condition()

    async def follow(self) -> None:
        async for data, _ in self._run.queue.read("receipts", live=True):
            receipt = wire.decode(data, Receipt)
            if receipt.kind == "trained" and receipt.step > self._newest:
                async with self._news:
                    self._newest = receipt.step
                    self._news.notify_all()

    async def more(self, updates: int) -> None:
        """Until so many more are done; those that are done again do not count."""
        goal = self._newest + updates
        async with asyncio.timeout(DEADLINE_S), self._news:
            await self._news.wait_for(lambda: self._newest >= goal)


async def measure(folder: Path, parts: list[str], rounds: int) -> tuple[list[Kill], Records]:
    async with System(folder, *SETS) as system, system.attached() as run:
        updates = Updates(run)
        following = asyncio.create_task(updates.follow())
        await updates.more(WARM_UPDATES)
        struck: list[tuple[str, float, float]] = []
        for number in range(rounds):
            for part in parts:
                before = time.time()
                pid = await system.kill(part)
                if pid is None:
                    raise SystemExit(f"the run ended before {part} was killed:\n{system.text[-3000:]}")
                await until(partial(is_gone, pid), f"{part} is gone", DEADLINE_S)
                struck.append((part, before, time.time()))
                await updates.more(QUIET_UPDATES)
                print(f"round {number + 1}: {part} killed, {QUIET_UPDATES} updates later", flush=True)
        ended = time.time()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        ends = [at for _, at, _ in struck[1:]] + [ended]
        kills = [Kill(*one, end) for one, end in zip(struck, ends, strict=True)]
        return kills, await read(run)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


async def read(run: Run) -> Records:
    async def all_of(stream: str, kind: type[Any], subject: str | None = None) -> list[Any]:
        return [wire.decode(data, kind) async for data, _ in run.queue.read(stream, subject=subject)]

    return Records(
        await all_of("trajectories", Group),
        await all_of("receipts", Receipt),
        await all_of("weights", Announcement, run.subjects.announced),
        await all_of("events", Event),
    )


def recovery(kill: Kill, records: Records) -> Recovery:
    mine = [event for event in records.events if kill.at <= event.at < kill.until]
    return Recovery(
        again_s=first(useful(kill, records), kill) - kill.at,
        restart_s=first((e.at for e in mine if e.kind == "restart" and e.replica == kill.part), kill) - kill.at
        if kill.part.endswith("-0")
        else 0.0,
        stood_still_s=stood_still(kill, records.receipts),
        redelivered=sum(e.detail["count"] for e in mine if e.kind == "redelivered"),
        trained_again=len(trained(kill, records.receipts) & trained_before(kill, records.receipts)),
    )


def useful(kill: Kill, records: Records) -> Iterable[float]:
    """When its successor left something, in whatever order."""
    if kill.part in ("rollout-0", "engine"):
        return (group.times["sampled"] for group in records.groups if group.times["started"] > kill.gone)
    if kill.part == "reward-0":
        return (group.times["scored"] for group in records.groups)
    if kill.part == "dcs-0":
        return (told.at for told in records.announced)
    kind = "issued" if kill.part == "controller-0" else "trained"
    return (receipt.at for receipt in records.receipts if receipt.kind == kind)


def first(moments: Iterable[float], kill: Kill) -> float:
    found = min((at for at in moments if at > kill.gone), default=float("inf"))
    if found >= kill.until:
        raise SystemExit(
            f"{kill.part} left nothing between its death and the next kill, {kill.until - kill.at:.1f} s later"
        )
    return found


def trained(kill: Kill, receipts: list[Receipt]) -> set[str]:
    return {one.group_id for one in receipts if one.kind == "trained" and kill.at < one.at <= kill.until}


def trained_before(kill: Kill, receipts: list[Receipt]) -> set[str]:
    return {one.group_id for one in receipts if one.kind == "trained" and one.at <= kill.at}


def stood_still(kill: Kill, receipts: list[Receipt]) -> float:
    """The longest pause between the last update before the kill and the last before the next one; what is done again counts as
    a pause."""
    done = max(one.step for one in receipts if one.kind == "trained" and one.at <= kill.at)
    before = max(one.at for one in receipts if one.kind == "trained" and one.at <= kill.at)
    new = sorted(
        one.at for one in receipts if one.kind == "trained" and kill.at < one.at < kill.until and one.step > done
    )
    return max(after - earlier for earlier, after in pairwise([before, *new]))


def table(found: dict[str, list[Recovery]]) -> dict[str, dict[str, float]]:
    """Printed, and as numbers."""
    heads = ("again after, s", "restarted after", "run stood still", "redelivered", "trained again")
    print(f"{'killed':14s}" + "".join(f"{head:>22s}" if at == 0 else f"{head:>17s}" for at, head in enumerate(heads)))
    rows = {}
    for part, recoveries in found.items():
        again = [one.again_s for one in recoveries]
        row = rows[part] = {
            "again_s": round(median(again), 2),
            "again_worst_s": round(max(again), 2),
            "restart_s": round(median(one.restart_s for one in recoveries), 2),
            "stood_still_s": round(median(one.stood_still_s for one in recoveries), 2),
            "redelivered": round(fmean(one.redelivered for one in recoveries), 1),
            "trained_again": round(fmean(one.trained_again for one in recoveries), 1),
        }
        span = f"{row['again_s']:.1f} ({min(again):.1f} to {max(again):.1f})"
        print(
            f"{part:14s}{span:>22s}{row['restart_s']:17.2f}{row['stood_still_s']:17.1f}{row['redelivered']:17.1f}"
            f"{row['trained_again']:17.1f}"
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one; may be given again")
    arguments = parser.parse_args()
    parts = arguments.part or list(PARTS)
    load, started = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kills, records = asyncio.run(measure(Path(folder) / "run", parts, arguments.rounds))
    found: dict[str, list[Recovery]] = defaultdict(list)
    for kill in kills:
        found[kill.part].append(recovery(kill, records))
    rows = table(found)
    reached = all(rows[part]["again_worst_s"] < AIM_S for part in AIMED if part in rows)
    print(f"aim: {', '.join(AIMED)} at work again within {AIM_S:.0f} s: {'reached' if reached else 'MISSED'}")
    about = {"rounds": arguments.rounds, "load_at_start": round(load, 1), "seconds": round(time.monotonic() - started)}
    print(json.dumps({"benchmark": "recovery", "aim_s": AIM_S, "reached": reached, **about, "parts": rows}))
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
