"""What a token is must not be guessed from its id: a mask made from `id != pad` leaves out real tokens of that id."""

from __future__ import annotations

import numpy as np

from services.trainer.batches import TrainSample, pack

PAD = 0


def sample(ids: list[int], mask: list[int]) -> TrainSample:
    size = len(mask)
    return TrainSample(
        group_id="0-0",
        ids=np.asarray([5, *ids], dtype=np.int64),
        prompt_len=1,
        mask=np.asarray(mask, dtype=np.uint8),
        logprobs=np.full(size, -1.0, dtype=np.float32),
        advantage=1.0,
    )


def test_a_completion_that_holds_the_padding_id_is_trained_on_whole() -> None:
    (batch,) = pack([sample([PAD, 7, PAD], [1, 1, 1]), sample([PAD], [1])], 100)
    assert sorted(batch.targets_N.tolist()) == [PAD, PAD, PAD, 7]
    assert batch.mask_N.all()
    assert len(batch.ids_T) == batch.lengths_S.sum() == 6, "and nothing is padded"


def test_what_an_environment_wrote_is_left_out_by_the_mask_alone() -> None:
    (batch,) = pack([sample([PAD, 7, 8], [1, 0, 1])], 100)
    assert batch.targets_N.tolist() == [PAD, 8]
