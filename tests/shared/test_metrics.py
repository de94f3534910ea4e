"""CPU seconds hold those of children, living or ended, once each."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from shared import metrics
from shared.metrics import CpuClock

BURN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> CpuClock:
    monkeypatch.setattr(metrics, "LOOK_S", 0.0)
    return CpuClock()


def test_living_and_ended_children_count_once(clock: CpuClock) -> None:
    before, own = clock.seconds(), time.process_time()
    code = BURN + "print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        living = clock.seconds() - before - (time.process_time() - own)
    ended = clock.seconds() - before - (time.process_time() - own)
    assert 0.27 < living < 0.7
    assert living - 0.03 < ended < living + 0.2


def test_the_children_of_children_count(clock: CpuClock) -> None:
    before, own = clock.seconds(), time.process_time()
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}], check=True); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 0.27 < clock.seconds() - before - (time.process_time() - own) < 0.9


def test_the_machine_is_not_searched_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(range(20))
    monkeypatch.setattr(CpuClock, "_look", lambda _: float(next(looks)))
    clock = CpuClock()
    for _ in range(20):
        clock.seconds()
    assert next(looks) == 1
