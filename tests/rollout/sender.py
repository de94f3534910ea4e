"""One sender of a distributed update among several: rank 0 of a group of its own. A process of its own.

    python -m tests.rollout.sender FOLDER GROUP

Prints its store's port, waits for one receiver, and then sends the tensors that a line on stdin names, as JSON, in one bucket;
and says `sent` of each.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from safetensors.torch import load_file

from services.dcs import collective

TIMEOUT_S = 60.0


def main(folder: str, group_name: str) -> None:
    collective.STALLED_S = TIMEOUT_S  # a bucket waits here until the test asks for it
    tensors = load_file(f"{folder}/model.safetensors")
    store = collective.host_store(TIMEOUT_S)
    print(store.port, flush=True)
    group = collective.join("127.0.0.1", store.port, 2, 0, group_name, "gloo", TIMEOUT_S, store)
    for line in sys.stdin:
        bucket = torch.cat([tensors[name].flatten().view(torch.uint8) for name in json.loads(line)])
        collective.broadcast(group, bucket, time.monotonic() + TIMEOUT_S)
        print("sent", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
