"""Running prompts through the model: padded batches under a token budget, one prefill for samples that share a prompt.

Also scores prompts when a request asks for it (`logprob_start_len`). Fills the cache's rows and yields logits; drawing is the
scheduler's. Checked by tests/rollout/test_light_engine.py (batching equals one by one) and test_light_model.py.

Shapes: B leaders of a chunk, T padded length, N = B*T, E hidden, S samples of the chunk, V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from services.rollout.engines.light.batch import Batch
from services.rollout.engines.light.kv_cache import Prefill
from services.rollout.engines.light.model import LENGTH_UNIT, Qwen3, round_up
from services.rollout.engines.light.protocol import Sequence

SCORE_ROWS = 1024
"""Prompt positions whose logits are held at once while scoring."""


def prefill(model: Qwen3, batch: Batch, start: int, budget: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Fill the cache of the rows from `start` on. Yields (first row, logits [S, V] of that row and the following ones)."""
    groups = _groups(batch.sequences, start)
    lengths = [len(_tokens(batch.sequences[group.start])) for group in groups]
    for first, stop in chunks(lengths, budget):
        yield groups[first].start, _chunk(model, batch, groups[first:stop])


def chunks(lengths: list[int], budget: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges whose padded size stays within `budget` tokens (a single one may exceed it)."""
    first, longest = 0, 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if index > first and (index + 1 - first) * longest > budget:
            yield first, index
            first, longest = index, length
    if lengths:
        yield first, len(lengths)


def _groups(sequences: list[Sequence], start: int) -> list[range]:
    """Ranges of rows with the same cache: fresh samples of one prompt. The first row of each is computed, the others copied."""
    groups: list[range] = []
    for row in range(start, len(sequences)):
        leader = sequences[groups[-1].start] if groups else None
        fresh = leader is not None and not leader.output and not sequences[row].output
        if fresh and leader is not None and sequences[row].prompt is leader.prompt:
            groups[-1] = range(groups[-1].start, row + 1)
        else:
            groups.append(range(row, row + 1))
    return groups


def _tokens(sequence: Sequence) -> list[int]:
    return sequence.prompt + sequence.output


def _chunk(model: Qwen3, batch: Batch, groups: list[range]) -> torch.Tensor:
    tokens = [_tokens(batch.sequences[group.start]) for group in groups]
    hidden_BTE = _run(model, batch, [group.start for group in groups], tokens)
    last = torch.tensor([len(ids) - 1 for ids in tokens], device=model.device)
    logits_BV = model.logits(hidden_BTE[torch.arange(len(groups), device=model.device), last])
    for index, group in enumerate(groups):
        for row in group[1:]:
            batch.cache.copy_row(group.start, row, len(tokens[index]))
            batch.sequences[row].cached_tokens = len(tokens[index])
        _score_prompt(model, hidden_BTE[index], [batch.sequences[row] for row in group])
    repeats = torch.tensor([len(group) for group in groups], device=model.device)
    return logits_BV.repeat_interleave(repeats, 0)


def _run(model: Qwen3, batch: Batch, rows: list[int], tokens: list[list[int]]) -> torch.Tensor:
    length = round_up(max(map(len, tokens)), LENGTH_UNIT)
    ids_BT = torch.tensor([ids + [0] * (length - len(ids)) for ids in tokens], device=model.device)
    positions_N = torch.arange(length, device=model.device).repeat(len(rows))
    cache = Prefill(batch.cache, torch.tensor(rows, device=model.device), length)
    return model.hidden(ids_BT.flatten(), positions_N, cache).unflatten(0, (len(rows), length))


def _score_prompt(model: Qwen3, hidden_TE: torch.Tensor, samples: list[Sequence]) -> None:
    """Unscaled log-probabilities of the prompt's tokens after position `score_from`, for those that want them."""
    start, prompt = samples[0].score_from, samples[0].prompt
    if start is None or samples[0].prompt_logprobs:
        return
    targets = torch.tensor(prompt[start + 1 :], device=model.device)
    states_TE = hidden_TE[start : len(prompt) - 1]
    logprobs: list[float] = []
    tops: list[list[tuple[float, int]]] = []
    for begin in range(0, len(targets), SCORE_ROWS):
        logits = model.logits(states_TE[begin : begin + SCORE_ROWS])
        part = targets[begin : begin + SCORE_ROWS]
        scored = torch.log_softmax(logits, -1)
        logprobs += scored.gather(1, part[:, None])[:, 0].tolist()
        if samples[0].top_k:
            values, ids = scored.topk(samples[0].top_k, dim=-1)
            tops += [list(zip(*row, strict=True)) for row in zip(values.tolist(), ids.tolist(), strict=True)]
    for sample in samples:
        sample.prompt_logprobs, sample.prompt_tops = logprobs, tops
