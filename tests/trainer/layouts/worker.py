"""Started by torchrun: goes through many layouts in one launch, for starting costs more than training here."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from services.trainer.build import build_rank
from services.trainer.channel import LEAVE, Channel, gather, meet
from services.trainer.follower import follow
from services.trainer.ranks import Ranks
from shared.config import RunConfig
from tests.trainer.layouts.measure import all_logprobs, measure, measure_critic, run_config


def main(plan: dict[str, Any], root: Path) -> None:
    """`plan`: {"ranks", "layouts": {name: {"model", "megatron", "dtype", "what", "reference"}}}. `what`: updates, logprobs or
    critic. Models and results lie below `root`; updates go on from the checkpoint of `reference` too."""
    configs = {
        name: run_config(root / one["model"], plan["ranks"], one["megatron"], one["dtype"], rank_timeout_s=300)
        for name, one in plan["layouts"].items()
    }
    channel = join(next(iter(configs.values())))
    for name, config in configs.items():
        started = time.monotonic()
        ranks = Ranks(partial(build_rank, config, "cpu"), channel)
        if channel.rank:
            follow(ranks)
            continue
        policy, out = ranks.add("policy", Path(config.model.path)), root / "results" / name
        what, reference = plan["layouts"][name]["what"], plan["layouts"][name]["reference"]
        out.mkdir(parents=True)
        if what == "logprobs":
            save_file({"logprobs": all_logprobs(policy)}, out / "logprobs.safetensors")
        elif what == "critic":
            measure_critic(policy, out)
        else:
            measure(policy, out, root / "results" / reference)
        channel.order({"do": LEAVE})
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)


def join(config: RunConfig) -> Channel:
    if os.environ["RANK"] != "0":
        return meet()[1]
    gathering = gather(config)
    assert gathering is not None
    return gathering.form({"device": "cpu"}, "cpu", config.trainer.rank_timeout_s)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
