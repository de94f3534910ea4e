"""Start a command that ends with this process: `python -m tests.tied PARENT COMMAND ...`, where PARENT is whose end is its end.

For what a test starts and nothing else would end if the test were killed.
"""

from __future__ import annotations

import os
import sys

from shared.parent import die_with_parent


def tied(*command: str) -> list[str]:
    """argv of a command that is to end with this process. Its process id is the command's own."""
    return [sys.executable, "-m", "tests.tied", str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
