"""Checkpoints that a crash cannot spoil.

A checkpoint is a folder `checkpoint-<sequence>-step-<step>` with the tensors (safetensors, a file a rank), everything else
(msgpack), the model's config and tokenizer, by which it can be exported without anything else, and a manifest with size and
sha256 of all. It is written under another name, synced, renamed in one step, and the parent folder is synced: it is there
completely or not at all, and saving never touches an older one. `begin` makes the folder, the ranks write their files into it
(state_files.py), `finish` does the rest. `sequence` only grows, so the newest is known even after a rollback to an earlier step.
What goes and what stays is decided after the new one is durable: the newest `keep` stay, those at every `keep_every`-th step, and
the `keep_best` with the highest score.

Failpoints mark the steps (shared/failpoints.py). Who has claimed the folder last is the only one who may save: a trainer that was
stopped, replaced and woken again gets `CheckpointTaken` instead of putting a lost history in front of the present one. The
number of its claim is the trainer's **epoch**, by which the ledger tells it from others.

Loading verifies every digest. A damaged checkpoint is set aside (renamed to `damaged-...`) and reported, and the one before
it is used; if checkpoints exist but none is whole, that is an error and not a fresh start. A full disk is a `DiskFullError`.
Enforced by tests/trainer/test_checkpoint.py, which kills the process while it saves.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from safetensors import SafetensorError

from services.trainer.hf_folder import companions
from services.trainer.state_files import Written, file_of, open_state
from services.trainer.tensorfile import DiskFullError, disk_errors, fsync_folder
from shared.failpoints import reach

FORMAT = 3
META, MANIFEST, MODEL = "meta.msgpack", "manifest.msgpack", "model"
NAME = re.compile(r"checkpoint-(\d{8})-step-(\d{8})")
UNFINISHED, DAMAGED = "saving-", "damaged-"
CLAIM = "claim-"
VERIFIERS = min(8, os.cpu_count() or 1)
"""Files are hashed side by side."""

__all__ = ["Checkpoint", "CheckpointError", "CheckpointStore", "CheckpointTaken", "Damage", "DiskFullError", "Entry"]


class CheckpointError(RuntimeError):
    """No checkpoint can be loaded, though there are some; or this process may not save here any more."""


class CheckpointTaken(CheckpointError):
    """Another trainer has taken the folder over."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint on the disk, not yet verified."""

    sequence: int
    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A checkpoint that is being written."""

    entry: Entry
    """What it will be."""
    folder: Path
    """Where its files go for now."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A checkpoint that was found unusable and set aside."""

    path: Path
    """Where it lies now."""
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint. The state lies in its folder (state_files.py): read from it what is needed."""

    entry: Entry
    meta: dict[str, Any]
    damaged: tuple[Damage, ...]
    """Newer ones that had to be passed over."""


class CheckpointStore:
    """The checkpoints of one run in one folder. One process at a time may save."""

    def __init__(
        self,
        folder: str | Path,
        keep: int = 2,
        keep_every: int = 0,
        keep_best: int = 0,
        model_folder: Path | None = None,
    ) -> None:
        self.folder, self.model_folder = Path(folder), model_folder
        self.keep, self.keep_every, self.keep_best = max(1, keep), keep_every, keep_best
        self._claim = 0

    def claim(self) -> int:
        """From now on nobody else may save here. Returns the number of the claim; numbers only grow."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = self._last_claim() + 1
        while True:
            try:
                with (self.folder / f"{CLAIM}{number:08d}").open("x"):
                    break
            except FileExistsError:  # another was faster
                number += 1
        fsync_folder(self.folder)
        for path in self.folder.glob(f"{CLAIM}*"):
            if path.name < f"{CLAIM}{number:08d}":
                path.unlink(missing_ok=True)
        self._claim = number
        return number

    def _last_claim(self) -> int:
        return max((int(path.name.removeprefix(CLAIM)) for path in self.folder.glob(f"{CLAIM}*")), default=0)

    def entries(self) -> list[Entry]:
        """All complete checkpoints, oldest first."""
        return self._named("")

    def _named(self, prefix: str) -> list[Entry]:
        if not self.folder.is_dir():
            return []
        named = (path for path in self.folder.iterdir() if path.name.startswith(prefix))
        found = ((NAME.fullmatch(path.name.removeprefix(prefix)), path) for path in named)
        return sorted(
            (Entry(int(match[1]), int(match[2]), path) for match, path in found if match),
            key=lambda entry: entry.sequence,
        )

    def set_aside(self, after: int = 0) -> list[Entry]:
        """Damaged ones with a sequence number above `after`, whenever they were found, oldest first."""
        return [entry for entry in self._named(DAMAGED) if entry.sequence > after]

    def go_back(self, step: int) -> list[Entry]:
        """Set the checkpoints newer than that of `step` aside, as damaged ones are, and return them. CheckpointError if there is
        none of that step. Repeating it changes nothing."""
        wanted = self.find(step)
        newer = [entry for entry in self.entries() if entry.sequence > wanted.sequence]
        for entry in reversed(newer):
            self._set_aside(entry, "rolled back")
        return newer

    def begin(self, step: int) -> Unfinished:
        """A folder for the files of the next checkpoint. What an earlier one left unfinished is cleared away."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_claim()
        sequence = max((entry.sequence for entry in (*self.entries(), *self.set_aside())), default=0) + 1
        target = self.folder / f"checkpoint-{sequence:08d}-step-{step:08d}"
        self._remove_unfinished()
        unfinished = Unfinished(Entry(sequence, step, target), self.folder / f"{UNFINISHED}{target.name}")
        unfinished.folder.mkdir()
        reach("checkpoint.begun")
        return unfinished

    def finish(
        self,
        unfinished: Unfinished,
        written: Mapping[str, Written],
        meta: Mapping[str, Any],
        score: float | None = None,
    ) -> Entry:
        """Add the rest to the files `written`, which are durable, and give the checkpoint its name; when this returns it is
        durable. `meta` is what msgpack can hold; `score` is what `keep_best` goes by, higher is better."""
        entry, folder = unfinished.entry, unfinished.folder
        try:
            packed = msgpack.packb({"format": FORMAT, "step": entry.step, "meta": dict(meta)}, use_bin_type=True)
            files = {**written, META: _write(folder / META, packed), **self._copy_companions(folder)}
            manifest = {"format": FORMAT, "files": files, "score": score}
            _write(folder / MANIFEST, msgpack.packb(manifest, use_bin_type=True))
            fsync_folder(folder)
            reach("checkpoint.written")
            self._check_claim()
            os.rename(folder, entry.path)
        except BaseException:
            self.abandon(unfinished)
            raise
        fsync_folder(self.folder)
        reach("checkpoint.named")
        for old in self._superfluous():
            # Renamed first: a crash halfway through must not leave a folder that looks like a checkpoint.
            doomed = old.path.with_name(f"{UNFINISHED}{old.path.name}")
            os.rename(old.path, doomed)
            reach("checkpoint.purging")
            shutil.rmtree(doomed)
        return entry

    def abandon(self, unfinished: Unfinished) -> None:
        """It will not be finished: make room."""
        shutil.rmtree(unfinished.folder, ignore_errors=True)

    def find(self, step: int) -> Entry:
        """The newest checkpoint of `step`. CheckpointError if there is none."""
        entries = self.entries()
        if found := [entry for entry in entries if entry.step == step]:
            return found[-1]
        known = ", ".join(str(entry.step) for entry in entries) or "none"
        raise CheckpointError(f"{self.folder}: no checkpoint of step {step}; there are {known}")

    def load(self, step: int | None = None) -> Checkpoint | None:
        """The newest whole checkpoint, or the newest of `step`. None: there has never been one."""
        if step is not None:
            self.find(step)
        candidates = [entry for entry in self.entries() if step is None or entry.step == step]
        damaged: list[Damage] = []
        for entry in reversed(candidates):
            try:
                meta = _read(entry.path)
            except (_Damaged, OSError) as error:
                damaged.append(self._set_aside(entry, str(error)))
                continue
            return Checkpoint(entry, meta, tuple(damaged))
        if damaged:
            reasons = "; ".join(f"step {damage.step}: {damage.reason}" for damage in damaged)
            raise CheckpointError(
                f"{self.folder}: no checkpoint is whole ({reasons}). They lie beside it as {DAMAGED}*; put a whole "
                "copy of one back, or start a new run under another name"
            )
        return None

    def _copy_companions(self, target: Path) -> dict[str, Any]:
        if self.model_folder is None:
            return {}
        (target / MODEL).mkdir()
        found = {
            f"{MODEL}/{path.name}": _write(target / MODEL / path.name, path.read_bytes())
            for path in companions(self.model_folder)
        }
        fsync_folder(target / MODEL)
        return found

    def _superfluous(self) -> list[Entry]:
        entries, best = self.entries(), list[Entry]()
        if self.keep_best:
            scored = [(score, entry) for entry in entries if (score := _score(entry)) is not None]
            best = [entry for _, entry in sorted(scored, key=lambda one: (-one[0], one[1].sequence))[: self.keep_best]]
        return [
            entry
            for entry in entries[: -self.keep]
            if entry not in best and not (self.keep_every and entry.step % self.keep_every == 0)
        ]

    def _set_aside(self, entry: Entry, reason: str) -> Damage:
        aside = entry.path.with_name(f"{DAMAGED}{entry.path.name}")
        if aside.exists():
            shutil.rmtree(aside)
        os.rename(entry.path, aside)
        return Damage(aside, entry.step, reason)

    def _check_claim(self) -> None:
        if self._claim and self._last_claim() != self._claim:
            raise CheckpointTaken(f"{self.folder}: another trainer has taken over; this one must stop")

    def _remove_unfinished(self) -> None:
        for path in self.folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path)


class _Damaged(Exception):
    """Why a checkpoint cannot be used."""


def _write(path: Path, data: bytes) -> dict[str, Any]:
    with disk_errors(path, len(data)), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def verify(path: Path) -> None:
    """CheckpointError unless the folder is a whole checkpoint."""
    try:
        _read(path)
    except (_Damaged, OSError) as error:
        raise CheckpointError(f"{path}: not a whole checkpoint ({error})") from error


def _read(path: Path) -> dict[str, Any]:
    """The meta of a checkpoint whose every file is verified."""
    manifest = _unpack(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise _Damaged(f"{MANIFEST}: format {manifest.get('format')!r}, this version reads {FORMAT}")
    files = manifest.get("files", {})
    names = sorted({file_of(0), META, *files})
    with ThreadPoolExecutor(VERIFIERS, thread_name_prefix="verify") as pool:
        for _ in pool.map(lambda name: _verify(path / name, files.get(name, {})), names):
            pass
    meta = _unpack(path / META)
    try:
        with open_state(path):
            pass
    except (SafetensorError, ValueError) as error:
        raise _Damaged(str(error)) from error
    return meta["meta"]


def _score(entry: Entry) -> float | None:
    try:
        return _unpack(entry.path / MANIFEST).get("score")
    except (_Damaged, OSError):
        return None  # loading will find out and say so


def _verify(path: Path, expected: dict[str, Any]) -> None:
    if not path.is_file():
        raise _Damaged(f"{path.name} is missing")
    size = path.stat().st_size
    if size != expected.get("size"):
        raise _Damaged(f"{path.name} has {size} bytes instead of {expected.get('size')}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected.get("sha256"):
        raise _Damaged(f"{path.name}: sha256 differs, its content was altered")


def _unpack(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise _Damaged(f"{path.name} is missing")
    try:
        unpacked = msgpack.unpackb(path.read_bytes(), raw=False, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise _Damaged(f"{path.name} is not readable ({error})") from error
    if not isinstance(unpacked, dict):
        raise _Damaged(f"{path.name} does not hold a record")
    return unpacked
