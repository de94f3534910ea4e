"""The running rows: which sequence sits in which row of the KV cache, and the numbers a decode step needs of each.

Owns the per-row arrays and their compaction. Guarantees that rows 0..len-1 are in use without a gap, and that row i of every
array, of the cache and of `sequences` belongs to the same sequence. Pure bookkeeping: no model, no thread. Its check is
tests/rollout/test_light_engine.py: requests that come and go give the tokens that they give alone.

Shapes: B rows in use, M rows at most
"""

from __future__ import annotations

import numpy as np
import torch

from services.rollout.engines.light.kv_cache import KVCache
from services.rollout.engines.light.model import MIN_ROWS
from services.rollout.engines.light.protocol import Sequence
from services.rollout.engines.light.sampling import Rows, uniforms


class Batch:
    def __init__(self, max_rows: int, cache: KVCache, device: torch.device) -> None:
        self.cache = cache
        self.device = device
        self.sequences: list[Sequence] = []
        size = max(max_rows, MIN_ROWS)
        self.ids_M = np.zeros(size, dtype=np.int64)
        """The newest token of each row: sampled, its key and value not yet in the cache."""
        self.positions_M = np.zeros(size, dtype=np.int64)
        """That token's position = tokens of the row that are in the cache."""
        self.keys_M = np.zeros(size, dtype=np.uint64)
        self.drawn_M = np.zeros(size, dtype=np.int64)
        """Tokens drawn so far: the place in the row's random stream."""
        self._rows: Rows | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence) -> int:
        """Give a sequence the next row."""
        row = len(self.sequences)
        self.sequences.append(sequence)
        self.keys_M[row] = sequence.key
        self.drawn_M[row] = len(sequence.output)
        self.positions_M[row] = len(sequence.prompt) + len(sequence.output) - 1
        self._rows = None
        return row

    def remove(self, rows: list[int]) -> list[Sequence]:
        """Take rows out; the last ones move into the gaps."""
        gone = [self.sequences[row] for row in rows]
        for row in sorted(rows, reverse=True):
            last = len(self.sequences) - 1
            if row != last:
                self.cache.copy_row(last, row, int(self.positions_M[last]))
                self.sequences[row] = self.sequences[last]
                for array in (self.ids_M, self.positions_M, self.keys_M, self.drawn_M):
                    array[row] = array[last]
            self.sequences.pop()
        if rows:
            self._rows = None
        return gone

    def clear(self) -> list[Sequence]:
        gone, self.sequences, self._rows = self.sequences, [], None
        return gone

    @property
    def longest(self) -> int:
        """Tokens of the longest row, its newest token included."""
        return int(self.positions_M[: len(self)].max()) + 1 if self.sequences else 0

    def draw(self, logits_BV: torch.Tensor, start: int = 0) -> tuple[list[int], list[float]]:
        """Sample a token for each row from `start` on, and advance those rows to it."""
        stop = start + logits_BV.shape[0]
        if start == 0 and stop == len(self):
            self._rows = self._rows or Rows([s.params for s in self.sequences], self.device)
            rows = self._rows
        else:
            rows = Rows([s.params for s in self.sequences[start:stop]], self.device)
        drawn_B = uniforms(self.keys_M[start:stop], self.drawn_M[start:stop])
        ids_B, logprobs_B = rows.draw(logits_BV, drawn_B)
        self.ids_M[start:stop] = ids_B.cpu().numpy()
        self.positions_M[start:stop] += 1
        self.drawn_M[start:stop] += 1
        return ids_B.tolist(), logprobs_B.tolist()
