"""Looking at processes that may end at any moment, also between two looks."""

from __future__ import annotations

from contextlib import suppress

import psutil


def ended(pid: int) -> bool:
    """It has gone, or only its parent's wait is missing."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def is_broker(pid: int) -> bool:
    """A nats-server, and no other process that has its number by now."""
    with suppress(psutil.Error):
        return "nats-server" in psutil.Process(pid).name()
    return False


def words(process: psutil.Process) -> list[str]:
    """Its command line; empty when it has ended."""
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return process.cmdline()
    return []


def children(pid: int, *, recursive: bool = False) -> list[psutil.Process]:
    """None of a process that has ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=recursive)
    return []


def replicas(launcher: int) -> dict[str, int]:
    """The service processes that a launcher has as its children: process ids by replica."""
    found = {}
    for child in children(launcher):
        command = words(child)
        if "--replica" in command:
            found[command[command.index("--replica") + 1]] = child.pid
    return found
