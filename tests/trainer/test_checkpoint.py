"""Checkpoints survive being killed at any point of saving, damage, and a full disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.checkpoint import CheckpointError, CheckpointStore, CheckpointTaken, Entry
from services.trainer.state_files import file_of, write
from services.trainer.tensorfile import DiskFullError
from tests.trainer import policies
from tests.trainer.policies import equal, train, weights
from tests.trainer.test_tensorfile import file_size_limit

META = {"version": 7, "trained": ["0-1", "0-2"], "window": {"head": 3, "taken": [5]}, "ledger_seq": 1 << 40}


def tensors(step: int, count: int = 1000) -> dict[str, torch.Tensor]:
    return {"weights/w": torch.full((count,), float(step)), "rng/cpu": torch.get_rng_state()}


def save(store: CheckpointStore, step: int, state: dict[str, torch.Tensor], meta: Any, **options: Any) -> Entry:
    unfinished = store.begin(step)
    try:
        written = {file_of(0): write(unfinished.folder / file_of(0), list(state.items()))}
    except OSError:
        store.abandon(unfinished)
        raise
    return store.finish(unfinished, written, meta, **options)


def test_gives_back_what_was_saved(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.load() is None
    entry = save(store, 3, tensors(3), META)
    found = store.load()
    assert found is not None
    assert (found.entry, found.meta, found.damaged) == (entry, META, ())
    assert equal(load_file(found.entry.path / file_of(0)), tensors(3))


def test_keeps_the_newest_and_removes_the_rest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    (tmp_path / "notes.txt").touch()
    for step in (1, 2, 3, 4):
        save(store, step, tensors(step), {})
    assert [entry.step for entry in store.entries()] == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-00000003-step-00000003",
        "checkpoint-00000004-step-00000004",
        "notes.txt",
    ]


def test_keeps_every_nth_and_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, keep_every=4, keep_best=1)
    for step, score in enumerate([0.1, 0.9, 0.3, None, 0.2, 0.9, 0.5]):
        save(store, step, tensors(step), {}, score=score)
    assert [entry.step for entry in store.entries()] == [0, 1, 4, 6]


def test_after_a_rollback_the_newest_is_the_last_saved_not_the_highest_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=4)
    for step in (10, 20):
        save(store, step, tensors(step), {"run": "before"})
    assert store.load(10).entry.step == 10  # type: ignore[union-attr]
    save(store, 12, tensors(12), {"run": "after"})
    save(store, 20, tensors(20), {"run": "after"})
    assert [(entry.sequence, entry.step) for entry in store.entries()] == [(1, 10), (2, 20), (3, 12), (4, 20)]
    assert store.load(20).meta == {"run": "after"}  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="no checkpoint of step 15; there are 10, 20, 12, 20"):
        store.load(15)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: truncate(folder / "state-00000.safetensors"), "has .* bytes instead of"),
        (lambda folder: flip(folder / "state-00000.safetensors"), "sha256 differs"),
        (lambda folder: flip(folder / "meta.msgpack"), "sha256 differs"),
        (lambda folder: (folder / "meta.msgpack").unlink(), "meta.msgpack is missing"),
        (lambda folder: (folder / "manifest.msgpack").unlink(), "manifest.msgpack is missing"),
        (lambda folder: (folder / "manifest.msgpack").write_bytes(b"\xc1"), "not readable"),
        (lambda folder: (folder / "manifest.msgpack").write_bytes(b"\x80"), "format None"),
    ],
)
def test_a_damaged_one_is_set_aside_and_the_one_before_is_used(
    tmp_path: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1, tensors(1), {"step": 1})
    spoil(save(store, 2, tensors(2), {"step": 2}).path)
    found = store.load()
    assert found is not None
    assert (found.entry.step, found.meta) == (1, {"step": 1})
    (damage,) = found.damaged
    assert damage.step == 2
    assert damage.path.is_dir()
    assert damage.path.name == "damaged-checkpoint-00000002-step-00000002"
    assert re.search(reason, damage.reason)
    save(store, 2, tensors(2), {"step": 2})  # goes on, and the damaged one does not count among those kept
    assert [entry.step for entry in store.entries()] == [1, 2]


def test_none_whole_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        flip(save(store, step, tensors(step), {}).path / "state-00000.safetensors")
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole \(step 2: .*; step 1: "):
        store.load()


def test_a_full_disk_is_a_clear_error_and_harms_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1, tensors(1), {})
    with file_size_limit(1 << 20), pytest.raises(DiskFullError, match=r"no room to write 4\.0 MB.*move `workdir`"):
        save(store, 2, tensors(2, count=1_000_000), {})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000001-step-00000001"]
    assert store.load().entry.step == 1  # type: ignore[union-attr]


KILL_EVERYWHERE = """
import os, signal, sys, pathlib
import torch
from services.trainer.checkpoint import CheckpointStore
from services.trainer.state_files import file_of, write

root, state = pathlib.Path(sys.argv[1]), {"w": torch.zeros(5000)}
OPERATIONS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")

def save(store, step):
    unfinished = store.begin(step)
    written = {file_of(0): write(unfinished.folder / file_of(0), [("w", state["w"] + step)])}
    store.finish(unfinished, written, {"step": step})

def save_and_die_at(point, folder):
    calls = 0
    def before(event, _arguments):
        nonlocal calls
        if event in OPERATIONS:
            calls += 1
            if calls == point:
                os.kill(os.getpid(), signal.SIGKILL)
    store = CheckpointStore(folder, keep=1)
    sys.addaudithook(before)
    save(store, 2)
    os._exit(0)

point = 0
while True:
    point += 1
    folder = root / str(point)
    save(CheckpointStore(folder, keep=1), 1)
    child = os.fork()
    if child == 0:
        save_and_die_at(point, folder)
    status = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(status):
        sys.exit(0 if os.WEXITSTATUS(status) == 0 else 1)
"""


def test_killed_at_any_point_of_saving_one_whole_checkpoint_remains(tmp_path: Path) -> None:
    """A child saves over a good checkpoint and is killed before its n-th file operation, for every n until it gets through."""
    subprocess.run(
        [sys.executable, "-c", KILL_EVERYWHERE, str(tmp_path)], check=True, timeout=600, cwd=Path(__file__).parents[2]
    )
    points = sorted(int(path.name) for path in tmp_path.iterdir())
    assert len(points) > 8
    steps = []
    for point in points:
        store = CheckpointStore(tmp_path / str(point), keep=1)
        found = store.load()
        assert found is not None
        assert found.damaged == ()
        assert found.meta == {"step": found.entry.step}
        state = load_file(found.entry.path / file_of(0))
        assert torch.equal(state["w"], torch.full((5000,), float(found.entry.step)))
        steps.append(found.entry.step)
        save(store, 3, state, {"step": 3})
        assert len(list(store.folder.iterdir())) == 1  # the next save clears away what the crash left
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}


def test_a_policy_goes_on_bit_for_bit_from_the_disk(tmp_path: Path, make_policy: Callable[..., Any]) -> None:
    straight = make_policy()
    train(straight, range(4))
    stopped = make_policy()
    train(stopped, range(2))
    store = CheckpointStore(tmp_path)
    policies.save(store, 2, stopped, META)
    train(stopped, range(20, 22))  # saved tensors are copies: what happens later does not reach them

    resumed = make_policy(seed=3)
    found = store.load()
    assert found is not None
    resumed.restore(found.entry.path)
    train(resumed, range(2, 4))
    assert equal(weights(resumed), weights(straight))


def test_whoever_claimed_the_folder_last_is_the_only_one_who_saves(tmp_path: Path) -> None:
    """A trainer that was stopped, replaced and woken again must not put a lost history in front of the present one."""
    old, new = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    old.claim()
    save(old, 1, tensors(1), META)
    new.claim()
    with pytest.raises(CheckpointTaken, match="another trainer has taken over"):
        save(old, 2, tensors(2), META)
    found = new.load()
    assert found is not None
    assert found.entry.step == 1
    save(new, 3, tensors(3), META)
    assert [entry.step for entry in new.entries()] == [1, 3]


def test_what_was_set_aside_stays_known_and_its_number_is_not_used_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2, 3):
        entry = save(store, step, tensors(step), META)
    (entry.path / "meta.msgpack").unlink()
    for _ in range(2):  # killed before it could say so, it finds the same when it starts again
        found = store.load()
        assert found is not None
        assert found.entry.step == 2
        assert [(aside.sequence, aside.step) for aside in store.set_aside(found.entry.sequence)] == [(3, 3)]
    assert save(store, 3, tensors(3), META).sequence == 4
    assert store.set_aside(4) == []
