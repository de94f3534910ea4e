"""The process group over which weights are broadcast, built exactly as SGLang's `init_weights_update_group` builds it.

The publisher is rank 0 and hosts the TCPStore; engines join with the ranks that the DCS gave them. The group lives beside the
trainer's own process groups and shares nothing with them. Every call has a deadline: a member that is dead or stopped makes
the others' calls raise CollectiveError, never hang (tests/dcs/test_collective.py kills and stops members). A group in which
a call failed is of no further use: `leave` it and drop it. Its sockets close with the last reference, and the other members
fail at once instead of at their own deadlines.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shared.errors import first_line

STALLED_S = 15.0
"""A bucket that has not moved for so long will not: some member is stopped or cut off."""


class CollectiveError(RuntimeError):
    """The group cannot be joined or a broadcast in it failed. The text names the group and the cause."""


def host_store(timeout_s: float) -> dist.TCPStore:
    """A TCPStore on a free port of every interface of this host; `.port` tells which. Does not wait for anyone."""
    return dist.TCPStore("0.0.0.0", 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def join(
    host: str,
    port: int,
    world_size: int,
    rank: int,
    group_name: str,
    backend: str,
    timeout_s: float,
    store: dist.TCPStore | None = None,
) -> dist.ProcessGroup:
    """Join the group as `rank`; returns once all `world_size` ranks are there. Rank 0 hands in the store that it hosts.

    `timeout_s` also bounds every later call in the group that is given no deadline of its own.
    """
    timeout = timedelta(seconds=timeout_s)
    # NCCL's watchdog ends the process when a call exceeds the group's time; the deadlines in here have to come first.
    patience = timeout * 2 if backend == "nccl" else timeout
    try:
        if store is None:
            store = dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)
        group, _ = distributed_c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            distributed_c10d.Backend(backend),
            distributed_c10d.PrefixStore(group_name, store),
            group_name=group_name,  # type: ignore[arg-type]  # a NewType that older torch lacks
            backend_options=None,
            timeout=patience,
        )
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(
            f"group {group_name}: rank {rank} of {world_size} could not join at {host}:{port} within {timeout_s:.0f} s: "
            f"{first_line(error)}"
        ) from error
    # What init_process_group would add; torch's own calls on the group want it.
    distributed_c10d._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
    return group


def broadcast(group: dist.ProcessGroup, tensor: torch.Tensor, deadline: float) -> None:
    """Broadcast from rank 0, done before `deadline` (time.monotonic) or CollectiveError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise CollectiveError("the broadcast's time was up before all buckets were sent")
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    # Gloo's own limit, because waiting for less leaves the call running, and its sockets open, until that limit.
    options.timeout = timedelta(seconds=min(left, STALLED_S))
    try:
        work = group.broadcast([tensor], options)
        if tensor.is_cuda:
            _wait_cuda(work, deadline)
        else:
            work.wait(timedelta(seconds=left + 1))
    except RuntimeError as error:
        raise CollectiveError(f"broadcast of {tensor.numel()} bytes failed: {first_line(error)}") from error


def _wait_cuda(work: dist.Work, deadline: float) -> None:
    """NCCL's `wait` only orders streams and returns at once, so completion is looked for instead."""
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise CollectiveError("the broadcast's time was up while a bucket was being sent")
        time.sleep(0.001)
    work.wait()


def leave(group: dist.ProcessGroup) -> None:
    """Destroy the group in this process. After a failed call this may take until that call's deadline: do it in a thread."""
    if distributed_c10d._world.pg_map.get(group) is None:
        return
    if dist.get_backend(group) == "nccl":
        group.abort()  # a broken NCCL group would wait for its peers in shutdown
    dist.destroy_process_group(group)
