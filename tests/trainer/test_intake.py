"""The trainer's end of the advantages queue over a real broker: one fate a group, whatever comes twice, late, or not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.trainer.intake import Intake, Rollback, oldest_step, sample_steps
from services.trainer.rollback import roll_back
from services.trainer.window import Window
from shared.broker import EmbeddedBroker
from shared.errors import TransportError
from shared.jetstream import Connection
from shared.ledger import Ledger
from shared.records import Group, Receipt, Rewards, Samples, Sampling, floats, ints
from shared.service import Context, ServiceFailed
from tests.controller.pipeline import fold, open_context, run_config
from tests.shared.runs import until


def group(issue: int, steps: tuple[int, ...] = (0, 0), lengths: tuple[int, ...] = (2, 3), version: int = 1) -> Group:
    """Two samples, drawn under the weights of `steps`."""
    total, spans = sum(lengths), [i for i, length in enumerate(lengths) if length]
    samples = Samples(
        lengths=ints(lengths),
        ids=ints(np.arange(total)),
        logprobs=floats(np.full(total, -1.0)),
        mask=np.ones(total, dtype="|u1"),
        finish=["stop"] * len(lengths),
        texts=["x"] * len(lengths),
        span_sample=ints(spans),
        span_start=ints([0] * len(spans)),
        span_end=ints([lengths[i] for i in spans]),
        span_version=ints([version] * len(spans)),
        span_step=ints([steps[i] for i in spans]),
    )
    made = Group(
        f"0-{issue}", "train", issue, issue, 0, "p", None, {}, Sampling(2, 8), ints([1]), samples, replica="r0"
    )
    made.rewards, made.advantages = Rewards(floats([0, 1]), {}, ["", ""]), floats([-1, 1])
    return made


def issued(issue: int) -> Receipt:
    return Receipt("issued", f"0-{issue}", issue, issue, 0)


def dropped(issue: int, reason: str = "zero_variance") -> Receipt:
    return Receipt("dropped", f"0-{issue}", issue, issue, 0, reason=reason)


def trained(issue: int, step: int, epoch: int = 1) -> Receipt:
    return Receipt("trained", f"0-{issue}", issue, issue, 0, step=step, detail={"epoch": epoch})


class Bench:
    """A run without anybody but the test."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.opened: list[Intake] = []

    async def tell(self, *receipts: Receipt) -> None:
        for receipt in receipts:
            await self.ctx.queue.publish(self.ctx.subjects.receipts, receipt)

    async def send(self, *groups: Group) -> None:
        for one in groups:
            await self.ctx.queue.publish(self.ctx.subjects.advantages, one, msg_id=one.id)

    async def intake(self, window: Window[Group] | None = None, epoch: int = 1) -> Intake:
        intake = Intake(self.ctx, window or Window(1), [], epoch)
        await intake.open()
        intake.follow()
        self.opened.append(intake)
        return intake

    async def rolls_back(self, start: Any, version: int) -> Intake:
        """A trainer that goes on from `start`."""
        intake = Intake(self.ctx, start.window, start.rollbacks, start.epoch)
        self.opened.append(intake)
        await intake.open()
        await roll_back(self.ctx, start, intake, version)
        intake.follow()
        return intake

    async def waiting(self) -> int:
        """Messages that nobody has acknowledged."""
        return (await self.ctx.queue.depths())["advantages"].messages


@pytest.fixture
async def bench(
    broker: EmbeddedBroker, connect: Callable[..., Awaitable[Connection]], run_name: str, tmp_path: Path
) -> AsyncIterator[Bench]:
    config = run_config(run_name, str(tmp_path), groups_per_step=2, max_staleness=1)
    bench = Bench(await open_context(await connect(broker.url), config, "trainer", "trainer-0"))
    yield bench
    for intake in bench.opened:
        await intake.close()
    await bench.ctx.queue.close()


def test_a_sample_without_a_token_has_no_age() -> None:
    one = group(0, steps=(4, 2), lengths=(3, 0))
    assert sample_steps(one, []).tolist() == [4, -1]
    assert one.samples is not None
    assert one.samples.oldest_steps().tolist() == [4, -1]
    assert sample_steps(one, [Rollback(version=2, step=3)]).tolist() == [3, -1]
    assert oldest_step(one, []) == 4
    assert oldest_step(group(0, lengths=(0, 0)), []) is None


async def test_what_a_checkpoint_covers_is_acknowledged_and_skipped_when_it_comes_again(bench: Bench) -> None:
    await bench.tell(*map(issued, range(3)))
    await bench.send(*map(group, range(3)))
    first = await bench.intake()
    assert [(await first.take(0)).id for _ in range(2)] == ["0-0", "0-1"]  # type: ignore[union-attr]
    state = first.window.state()
    await first.close()  # killed after the checkpoint, before any ack
    second = await bench.intake(Window.restore(state))
    taken = await second.take(1)
    assert taken is not None
    assert taken.id == "0-2"
    await until(lambda: _is(bench.waiting(), 1), "the covered two are acknowledged")
    await second.covered(["0-2"])
    assert await bench.waiting() == 0


async def test_a_group_that_was_dropped_before_the_start_is_never_trained(bench: Bench) -> None:
    """Its drop was on record, but the ack was not sent any more: the message comes again."""
    await bench.tell(issued(0), issued(1), dropped(0, "stale"))
    await bench.send(group(0), group(1))
    intake = await bench.intake()
    taken = await intake.take(0)
    assert taken is not None
    assert taken.id == "0-1"


async def test_a_drop_without_an_issue_number_is_looked_up(bench: Bench) -> None:
    """As for a message that could not even be decoded: nobody waits for its group."""
    await bench.tell(issued(0), issued(1), Receipt("dropped", "0-0", reason="dead:reward"))
    await bench.send(group(1))
    taken = await (await bench.intake()).take(0)
    assert taken is not None
    assert taken.id == "0-1"


async def test_a_drop_may_be_on_record_before_its_issue(bench: Bench) -> None:
    await bench.tell(dropped(0), issued(0), issued(1))
    await bench.send(group(1))
    taken = await (await bench.intake()).take(0)
    assert taken is not None
    assert taken.id == "0-1"


async def test_what_waited_in_the_queue_for_too_long_is_dropped_as_stale(bench: Bench) -> None:
    await bench.tell(issued(0), issued(1))
    await bench.send(group(0, steps=(2, 0)), group(1, steps=(2, 1)))
    taken = await (await bench.intake(epoch=7)).take(2)
    assert taken is not None
    assert taken.id == "0-1"
    ledger = await fold(bench.ctx)
    assert ledger.dropped == {"stale": 1}
    assert await bench.waiting() == 1


async def test_an_unreadable_message_is_buried_and_its_group_not_waited_for(bench: Bench) -> None:
    await bench.tell(issued(0), issued(1))
    await bench.ctx.queue.publish(bench.ctx.subjects.advantages, b"not a record", msg_id="0-0")
    await bench.send(group(1))
    taken = await (await bench.intake()).take(0)
    assert taken is not None
    assert taken.id == "0-1"
    ledger = await fold(bench.ctx)
    assert (ledger.dropped, ledger.balanced) == ({"dead:trainer": 1}, True)


async def test_a_replaced_trainer_can_neither_take_nor_acknowledge(bench: Bench) -> None:
    await bench.tell(issued(0), issued(1))
    await bench.send(group(0), group(1))
    old = await bench.intake()
    assert await old.take(0) is not None
    await bench.intake(epoch=2)
    with pytest.raises(TransportError):
        await old.covered(["0-0"])
    assert await bench.waiting() == 2


async def test_waiting_for_a_round_takes_nothing(bench: Bench) -> None:
    await bench.tell(*map(issued, range(3)), dropped(1))
    await bench.send(group(2), group(0))
    intake = await bench.intake()
    assert await intake.until_settled(3)
    assert intake.window.waiting == 2
    bench.ctx.stopping.set()
    assert not await intake.until_settled(4)


def damaged(step: int, sequence: int, epoch: int = 2) -> Any:
    """A start from the checkpoint of step 0, whose successor is damaged."""
    seen = {"damaged_step": step, "damaged_sequence": sequence}
    return SimpleNamespace(step=0, rollbacks=[], window=Window(1), epoch=epoch, resumed=True, untold=[], **seen)


async def test_groups_that_only_a_damaged_checkpoint_covered_are_dropped_once(bench: Bench) -> None:
    """Four groups were trained and acknowledged; the trainer dies twice on its way back."""
    await bench.tell(*map(issued, range(6)), *(trained(issue, issue // 2) for issue in range(4)))
    for version in (5, 6):
        start = damaged(step=2, sequence=3, epoch=version)
        intake = await bench.rolls_back(start, version)
        ledger = await fold(bench.ctx)
        assert (ledger.trained, ledger.dropped, ledger.pending) == (0, {"rollback": 4}, 2)
        assert ledger.balanced
    assert start.rollbacks == [Rollback(6, 0)]
    await bench.send(group(4))
    taken = await intake.take(0)
    assert taken is not None
    assert taken.id == "0-4"


async def test_a_deterministic_run_says_that_it_cannot_keep_its_promise(bench: Bench) -> None:
    await bench.tell(*map(issued, range(4)), *(trained(issue, issue // 2) for issue in range(4)))
    bench.ctx.config.deterministic = True
    with pytest.raises(ServiceFailed, match="--set deterministic=false"):
        await bench.rolls_back(damaged(step=2, sequence=3), 5)
    start = damaged(step=0, sequence=0)
    await bench.rolls_back(start, 5)
    assert start.rollbacks == [], "the lost history is the one to come"


async def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(bench: Bench) -> None:
    await bench.tell(issued(0), trained(0, 0))
    start = SimpleNamespace(resumed=False, window=Window(1), rollbacks=[], epoch=2)
    with pytest.raises(ServiceFailed, match="1 groups are trained, but there is no checkpoint"):
        await bench.rolls_back(start, 5)


async def test_receipts_that_only_the_last_checkpoint_knows_are_written_by_the_next_trainer(bench: Bench) -> None:
    """The last checkpoint comes before the last receipts, on which the run ends: killed between the two, one was written."""
    await bench.tell(issued(0), issued(1), trained(0, 0))
    start = damaged(step=0, sequence=0)
    start.step, start.untold = 1, [trained(0, 0), trained(1, 0)]
    await bench.rolls_back(start, 5)
    ledger = await fold(bench.ctx)
    assert (ledger.trained, ledger.balanced, ledger.by_step) == (2, True, {0: ["0-0", "0-1"]})


async def test_a_trainer_that_learns_of_a_later_one_stops(bench: Bench) -> None:
    await bench.tell(issued(0))
    old = await bench.intake(epoch=2)
    await bench.tell(Receipt("rollback", step=0, detail={"epoch": 3}, replica="trainer-1"))
    with pytest.raises(ServiceFailed, match="trainer-1.*has taken over"):
        await old.take(0)


def test_what_a_replaced_trainer_still_writes_does_not_count() -> None:
    ledger = Ledger()
    for receipt in (issued(0), issued(1), issued(2), trained(0, 0, epoch=1)):
        ledger.apply(receipt)
    ledger.apply(Receipt("rollback", step=0, detail={"epoch": 4}))
    late = [trained(0, 0, epoch=2), trained(1, 5, epoch=3), Receipt("rollback", step=0, detail={"epoch": 3})]
    late.append(Receipt("dropped", "0-2", 2, reason="stale", detail={"epoch": 1}))
    for receipt in late:
        assert not ledger.apply(receipt)
    assert (ledger.trained, ledger.pending, ledger.fenced) == (0, 3, 4)
    ledger.apply(trained(0, 0, epoch=4))
    assert (ledger.trained, ledger.conflicts, ledger.balanced) == (1, [], True)


async def _is(value: Awaitable[int], expected: int) -> bool:
    return await value == expected
