"""`python -m services.rollout.engines.sglang.serve OPTIONS`: SGLang's own server, with our hooks; options are SGLang's.

Run by the interpreter of SGLang's environment (`make install-sglang`). SGLang starts its scheduler and the others by `spawn`,
which imports this module again in each of them: that is why the stand-ins and the hooks are put in place at import. The server
ends with the process that started it.
"""

from __future__ import annotations

import os
import sys

from services.rollout.engines.sglang import plugin, standins
from services.rollout.engines.sglang.command import STANDINS
from shared.parent import die_with_parent

if os.environ.get(STANDINS) == "1":
    standins.install()
plugin.register()


def main() -> None:
    die_with_parent(os.getppid())
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
