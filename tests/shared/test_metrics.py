"""CPU seconds hold those of children, living or ended, once each."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from shared import metrics
from shared.metrics import CpuClock

BURN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
TELL = "print(time.process_time(), flush=True); input()"
"""What it has burnt, its start included. Counted twice it would be twice that."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> CpuClock:
    """Blind to the children that other tests have started: brokers, fork servers."""
    monkeypatch.setattr(metrics, "LOOK_S", 0.0)
    children = psutil.Process.children
    others = {child.pid for child in psutil.Process().children(recursive=True)}

    def new(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        return [child for child in children(process, recursive) if child.pid not in others]

    monkeypatch.setattr(psutil.Process, "children", new)
    return CpuClock()


def of_children(clock: CpuClock) -> float:
    """What the clock shows beyond this process's own CPU seconds, which it reads before it looks at others."""
    own = time.process_time()
    return clock.seconds() - own


def test_living_and_ended_children_count_once(clock: CpuClock) -> None:
    before = of_children(clock)
    with subprocess.Popen([sys.executable, "-c", BURN + TELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        burnt = float(child.stdout.readline())
        living = of_children(clock) - before
    ended = of_children(clock) - before
    assert 0.8 * burnt < living < 1.5 * burnt
    assert 0.8 * burnt < ended < 1.7 * burnt


def test_the_children_of_children_count(clock: CpuClock) -> None:
    before = of_children(clock)
    code = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}], check=True); "
    code += "print(sum(os.times()[:4]), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        burnt = float(child.stdout.readline())
        assert 0.8 * burnt < of_children(clock) - before < 1.5 * burnt


def test_the_machine_is_not_searched_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(range(20))
    monkeypatch.setattr(CpuClock, "_look", lambda _: float(next(looks)))
    clock = CpuClock()
    for _ in range(20):
        clock.seconds()
    assert next(looks) == 1
