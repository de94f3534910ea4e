"""Continuous batching in one thread: the only place that runs the model, and the only one that touches running requests.

Everything else reaches it through `submit` and `call` (a function run between two steps). Guarantees, held by
tests/rollout/test_light_engine.py and test_light_updates.py:
* a waiting request starts at any step at which a row and its whole need of KV cache are free, in the order of arrival; a full
  cache makes requests wait, never fail;
* the n samples of a prompt share one prefill;
* what a request gets does not depend on what runs beside it;
* a token's log-probability is that of the weights its span names. A switch of weights happens between two steps; under
  `retract` the running requests go back to the queue and their cache is computed again, under `in_place` it is kept;
* an error in the model ends the engine loudly (`on_death`), with every request answered; the supervisor starts it again.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from services.rollout.engines.light.batch import Batch
from services.rollout.engines.light.kv_cache import Decode, KVCache, plan
from services.rollout.engines.light.model import MIN_ROWS, Qwen3
from services.rollout.engines.light.prefill import prefill
from services.rollout.engines.light.protocol import Sequence

Mode = Literal["retract", "in_place"]
PauseMode = Literal["abort", "retract", "in_place"]
T = TypeVar("T")


class SchedulerDead(RuntimeError):
    """The model's thread has ended; nothing more can be generated."""


@dataclass(slots=True)
class Job:
    """The sequences of one HTTP request; `future` gets its result when all have finished."""

    sequences: list[Sequence]
    future: Future[None]
    left: int


class Scheduler:
    def __init__(
        self,
        model: Qwen3,
        cache: KVCache,
        max_rows: int,
        prefill_tokens: int,
        version: str,
        on_death: Callable[[], None],
    ) -> None:
        self.model = model
        self.version = version
        self.paused: PauseMode | None = None
        self.failed = self.released = False
        self.max_rows = max_rows
        self.prefill_tokens = prefill_tokens
        self.cache = cache
        self.batch = Batch(max_rows, cache, model.device)
        self.waiting: deque[Sequence] = deque()
        self.generated = 0
        self.last_switch: dict[str, float] = {}
        """`pause_s`: how long it kept generation from its next step; `next_token_s`: until running requests had a token again."""
        self._switched_at = 0.0
        self._jobs: dict[Sequence, Job] = {}
        self._mail: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._on_death = on_death
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # ---- any thread

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` in the scheduler's thread, between two steps."""
        future: Future[T] = Future()
        with self._wake:
            if self._stopping:
                future.set_exception(SchedulerDead("the engine has stopped"))
                return future
            self._mail.append((function, future))
            self._wake.notify()
        return future

    def submit(self, sequences: list[Sequence]) -> Future[None]:
        """Generate; the future is done when every sequence has its `finish`."""
        job = Job(sequences, Future(), len(sequences))
        job.future.set_running_or_notify_cancel()  # a client that goes away aborts by rid; it cannot cancel what runs

        def enqueue() -> None:
            self._jobs.update((sequence, job) for sequence in sequences)
            self.waiting.extend(sequences)

        accepted = self.call(enqueue)
        accepted.add_done_callback(lambda done: _forward_error(done, job.future))
        return job.future

    def stop(self, timeout_s: float) -> bool:
        """Abort everything and end the thread; False if it did not end in time."""
        if self._thread.is_alive():
            self.call(lambda: self.abort(lambda _: True, "the engine is shutting down"))
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    # ---- the scheduler's thread: through `call`

    def abort(self, matches: Callable[[Sequence], bool], message: str) -> int:
        """End matching requests with what they have."""
        rows = [row for row, sequence in enumerate(self.batch.sequences) if matches(sequence)]
        ended = self.batch.remove(rows) + [s for s in self.waiting if matches(s)]
        self.waiting = deque(s for s in self.waiting if not matches(s))
        for sequence in ended:
            self._finish(sequence, {"type": "abort", "message": message, "status_code": 499, "err_type": "AbortError"})
        return len(ended)

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping: end all requests, send them back to the queue, or freeze them."""
        if mode == "abort":
            self.abort(lambda _: True, "aborted by pause_generation")
        elif mode == "retract":
            self._retract()
        self.paused = mode

    def resume(self) -> None:
        self.paused = None

    @property
    def asleep(self) -> bool:
        """It has no memory to generate in, or no weights; requests wait."""
        return self.released or self.model.live.hollow

    def release(self) -> bool:
        """Give the cache's memory back; nothing starts until `take`. False: something is running."""
        if self.batch:
            return False
        self.released = True
        self.cache.give_back()
        return True

    def release_weights(self) -> bool:
        """The weights' memory, likewise; nothing starts until other weights are switched in."""
        if self.batch:
            return False
        self.model.let_go()
        return True

    def take(self) -> None:
        if self.released:
            self.cache.take()
        self.released = False

    def switch(self, apply: Callable[[], None], version: str | None, mode: Mode | None) -> int:
        """Change the weights between two steps. Returns how many running requests it met."""
        met, started = len(self.batch), time.perf_counter()
        apply()
        if version is not None:
            self.version = version
        if (mode or self.paused) == "in_place":
            for sequence in self.batch.sequences:
                sequence.begin_span(self.version)
        else:
            self._retract()
            if not self.released:
                self.cache.clear()
        self.last_switch = {"pause_s": time.perf_counter() - started}
        self._switched_at = started if met else 0.0
        return met

    def relabel(self, version: str) -> None:
        """Another name for the same weights."""
        self.version = version
        for sequence in self.batch.sequences:
            sequence.begin_span(version)

    def _retract(self) -> None:
        retracted = self.batch.clear()
        for sequence in retracted:
            sequence.retractions += 1
        self.waiting.extendleft(reversed(retracted))

    # ---- the loop

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._read_mail():
                    self._admit()
                    if self.batch and not self.paused:
                        self._decode()
        except Exception:  # noqa: BLE001 - printed, and it ends the process
            traceback.print_exc()
            self.failed = True
        self._fail_all()
        if self.failed:
            self._on_death()

    def _read_mail(self) -> bool:
        """Run what was asked for; wait while there is nothing to do. False: the thread shall end."""
        while True:
            with self._wake:
                while not (self._mail or self._stopping or self._has_work()):
                    self._wake.wait()
                mail, self._mail = self._mail, deque()
                stopping = self._stopping
            for function, future in mail:
                _answer(function, future)
            if stopping:
                return False
            if self._has_work():
                return True

    def _has_work(self) -> bool:
        return not self.paused and not self.asleep and bool(self.batch or self.waiting)

    def _admit(self) -> None:
        """Start as many waiting requests as fit, and sample their first tokens."""
        if self.paused or self.asleep or not self.waiting:
            return
        needs = (sequence.need for sequence in self.waiting)
        count, length = plan(len(self.batch), self.cache.length, needs, self.cache.capacity, self.max_rows)
        if not count:
            return
        self.cache.lay_out(length, len(self.batch), self.batch.longest)
        start = len(self.batch)
        for _ in range(count):
            sequence = self.waiting.popleft()
            sequence.begin_span(self.version)
            self.batch.add(sequence)
        for first, logits_BV in prefill(self.model, self.batch, start, self.prefill_tokens):
            self._take(self.batch.draw(logits_BV, first), first)
        self._remove_finished(start)

    def _decode(self) -> None:
        batch = self.batch
        size = len(batch)
        rows = max(size, MIN_ROWS)
        ids = torch.from_numpy(batch.ids_M[:rows]).to(self.model.device)
        positions = torch.from_numpy(batch.positions_M[:rows]).to(self.model.device)
        hidden_NE = self.model.hidden(ids, positions, Decode(self.cache, positions[:size], batch.longest))
        self._take(batch.draw(self.model.logits(hidden_NE[:size])), 0)
        self._remove_finished(0)

    def _take(self, drawn: tuple[list[int], list[float]], first: int) -> None:
        """Append drawn tokens to their sequences and mark what has finished."""
        ids, logprobs = drawn
        for sequence, token, logprob in zip(self.batch.sequences[first : first + len(ids)], ids, logprobs, strict=True):
            params, output = sequence.params, sequence.output
            if len(output) >= params.max_new_tokens:  # 0 new tokens: only the prompt was to be scored
                sequence.finish = {"type": "length", "length": params.max_new_tokens}
                continue
            if math.isnan(logprob):
                message = f"the logits are not finite under weight version {self.version}"
                sequence.finish = {
                    "type": "abort",
                    "message": message,
                    "status_code": 500,
                    "err_type": "InternalServerError",
                }
                continue
            output.append(token)
            sequence.logprobs.append(logprob)
            if token in params.stop_ids:
                sequence.finish = {"type": "stop", "matched": token}
            elif len(output) >= params.max_new_tokens:
                sequence.finish = {"type": "length", "length": params.max_new_tokens}
        self.generated += len(ids)
        if self._switched_at:
            self.last_switch["next_token_s"] = time.perf_counter() - self._switched_at
            self._switched_at = 0.0

    def _remove_finished(self, start: int) -> None:
        rows = [start + i for i, sequence in enumerate(self.batch.sequences[start:]) if sequence.finish is not None]
        for sequence in self.batch.remove(rows):
            self._finish(sequence, sequence.finish)

    def _finish(self, sequence: Sequence, reason: dict[str, Any] | None) -> None:
        sequence.finish = reason
        job = self._jobs.pop(sequence)
        job.left -= 1
        if not job.left:
            job.future.set_result(None)

    def _fail_all(self) -> None:
        with self._wake:
            self._stopping = True
            mail, self._mail = self._mail, deque()
        for _, future in mail:
            if future.set_running_or_notify_cancel():
                future.set_exception(SchedulerDead("the engine has stopped"))
        for job in {id(job): job for job in self._jobs.values()}.values():
            job.future.set_exception(SchedulerDead("the model's thread has ended; see the engine's log"))
        self._jobs.clear()


def _answer(function: Callable[[], Any], future: Future[Any]) -> None:
    """Run a piece of mail. Its error belongs to who sent it, not to the loop."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:  # noqa: BLE001 - handed to the sender
        future.set_exception(error)


def _forward_error(done: Future[None], target: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        target.set_exception(error)
