"""The other side of a distributed update: rank 0, which hosts the store and broadcasts. A process of its own.

    python -m tests.rollout.publisher A_FOLDER B_FOLDER [RECEIVERS]

Prints the store's port, joins, sends B in two flattened buckets and then A tensor by tensor, waits for a line on stdin, and is
gone in the middle of a third update.
"""

from __future__ import annotations

import sys
import time

import torch
from safetensors.torch import load_file

from services.dcs import collective

GROUP = "weights"
TIMEOUT_S = 60.0


def main(a_folder: str, b_folder: str, receivers: str = "1") -> None:
    collective.STALLED_S = TIMEOUT_S  # a bucket waits here until the test asks for it
    store = collective.host_store(TIMEOUT_S)
    print(store.port, flush=True)
    group = collective.join("127.0.0.1", store.port, 1 + int(receivers), 0, GROUP, "gloo", TIMEOUT_S, store)
    b = load_file(f"{b_folder}/model.safetensors")
    for names in halves(b):
        bucket = torch.cat([b[name].flatten().view(torch.uint8) for name in names])
        collective.broadcast(group, bucket, time.monotonic() + TIMEOUT_S)
    for _, tensor in sorted(load_file(f"{a_folder}/model.safetensors").items()):
        collective.broadcast(group, tensor, time.monotonic() + TIMEOUT_S)
    sys.stdin.readline()


def halves(tensors: dict[str, torch.Tensor]) -> tuple[list[str], list[str]]:
    names = sorted(tensors)
    return names[: len(names) // 2], names[len(names) // 2 :]


if __name__ == "__main__":
    main(*sys.argv[1:])
