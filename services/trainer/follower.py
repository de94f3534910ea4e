"""A rank of the trainer that is not the leader: it has no broker, only orders to follow (ranks.py).

It ends with 0 when the leader lets it go, and with 1 when the leader or another rank is gone, or when it fails itself. Signals
that ask to drain are the leader's to act on. Started by the leader, by torchrun through `slipstream serve trainer`, or as
`python -m services.trainer.follower`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from functools import partial

from services.trainer.build import build_rank
from services.trainer.channel import LEADER_PID, LEAVE, RankLost, meet
from services.trainer.ranks import TELLABLE, Ranks
from shared import config as run_config
from shared.parent import die_with_parent

log = logging.getLogger(__name__)

TOLD = tuple(TELLABLE.values())


def main() -> int:
    """Live as a rank until the leader lets go. Returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if LEADER_PID in os.environ:
        die_with_parent(int(os.environ[LEADER_PID]))
    logging.basicConfig(
        level=os.environ.get("SLIPSTREAM_LOG", "INFO"),
        format=f"%(asctime)s trainer rank {os.environ['RANK']} %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    try:
        form, channel = meet()
        follow(Ranks(partial(build_rank, run_config.loads(form["config"]), form["device"]), channel))
    except (RankLost, *TOLD) as error:  # type: ignore[misc]
        log.error("%s", error)
        return 1
    return 0


def follow(ranks: Ranks) -> None:
    """Do what the leader orders until it lets go."""
    assert ranks.channel is not None
    while (order := ranks.channel.next())["do"] != LEAVE:
        try:
            ranks.take_part(order)
        except TOLD as error:
            log.warning("%s: %s", order["do"], error)  # the leader has it too and decides


if __name__ == "__main__":
    sys.exit(main())
