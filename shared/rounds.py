"""Deterministic runs: under which weights a group is drawn is a function of the run file alone, never of anybody's timing. Pure.

Seeded sampling and strict issue order (`window: 1`) are not enough once weights may be older than the newest: which version a
replica holds when it comes to a prompt, and which drops the controller has heard of when it issues one, are matters of chance.
With `deterministic: true` the groups therefore come in **rounds**: round k is drawn under the weights of step k, all of it and
nothing else.

1. When update k - 1 is complete the controller issues round k: everything below the issue number `end(...)`, which counts from
   the last group of update k - 1 and not from the drops that happen to be known. Should drops leave update k short of its batch,
   each missing group is issued at once, in round k too: it is needed for certain.
2. A rollout draws a group under the weights of exactly its `min_step`, which is its round, in one go. What a switch of weights
   interrupted is drawn again; a group whose round is over is a second delivery, by 3.
3. The trainer completes update k only when every group of the rounds up to k has reached it or was dropped. So nobody needs the
   weights of step k any more once those of step k + 1 exist, and drawing round k still overlaps with training update k.
4. After a rollback the same updates are done again with the same result, so weights of the lost history are those of this one:
   they keep their step, nothing becomes stale, and no waiver applies. The audit holds the digests of both against each other.

The bound holds as before: what is issued in round k lies within the slots behind the last group of update k - 1, so it is trained
in update k + S at the latest. Model: tests/controller/test_rounds.py. Whole runs that are killed everywhere:
tests/chaos/test_determinism.py.
"""

from __future__ import annotations


def end(*, steps: int, groups_per_step: int, slots: int, step: int, head: int) -> int:
    """First issue number behind round `step`, further ones for dropped groups aside. `head`: the one behind the last group
    trained in update `step` - 1."""
    return head + min(slots, (steps - step) * groups_per_step)
