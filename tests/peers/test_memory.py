"""Memory that grows by the step: a fetch buffer elsewhere leaked two gigabytes a step, and the run died at step 113."""

from __future__ import annotations

import gc

import psutil

from tests.trainer.test_intake import Bench, bench, group, issued

__all__ = ["bench"]

STEPS, GROUPS, WARM = 200, 4, 60
TOKENS = 20_000
"""So that a leaked group would be 340 KB, and all of those after the warm-up 190 MB."""


async def test_two_hundred_steps_leave_memory_flat(bench: Bench) -> None:
    bench.ctx.config.max_staleness = STEPS
    intake = await bench.intake()
    process, before = psutil.Process(), 0
    for step in range(STEPS):
        numbers = range(step * GROUPS, (step + 1) * GROUPS)
        await bench.tell(*map(issued, numbers))
        await bench.send(*(group(number, lengths=(TOKENS, 3)) for number in numbers))
        taken = [await intake.take(step) for _ in numbers]
        assert [one.issue for one in taken if one is not None] == list(numbers)
        await intake.covered([one.id for one in taken if one is not None])
        del taken
        if step == WARM:
            gc.collect()
            before = process.memory_info().rss
    gc.collect()
    grown = process.memory_info().rss - before
    assert grown < 40 << 20, f"{grown >> 20} MB more after {STEPS - WARM} steps"
    assert await bench.waiting() == 0
