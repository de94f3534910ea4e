"""The stage of the light engine's updates: when it hashes, and that its buckets are used again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from services.dcs.digest import tensor_checksum
from services.rollout.engines.light import stage as module
from services.rollout.engines.light.stage import Stage, Stager

SIZE = 1024
CPU = torch.device("cpu")


@dataclass
class Parameter:
    written: list[torch.Tensor] = field(default_factory=list)

    def write(self, tensor: torch.Tensor) -> None:
        self.written.append(tensor.clone())


@dataclass
class Tensors:
    """As much of a model's as a stage needs."""

    parameters: dict[str, Parameter]


@pytest.fixture
def stager() -> Iterator[Stager]:
    made = Stager()
    yield made
    made.close()


def stage_for(count: int) -> Stage:
    return Stage(Tensors({f"t{number}": Parameter() for number in range(count)}))  # type: ignore[arg-type]


def receive(stager: Stager, stage: Stage, count: int) -> list[int]:
    """So many buckets of one tensor each. Returns where they lie."""
    places = []
    for number in range(count):
        bucket = stager.bucket(SIZE, CPU)
        bucket.fill_(number)
        places.append(bucket.data_ptr())
        stager.put(stage, {f"t{number}": bucket}, bucket)
    return places


@pytest.mark.parametrize("few", [False, True])
def test_where_cores_are_few_nothing_is_hashed_before_all_is_there(
    stager: Stager, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FEW_CORES", few)
    stage = stage_for(3)
    with stager.receiving():
        receive(stager, stage, 3)
        if few:
            assert not stage.specs
        else:
            stage.settle()
    stage.settle()
    for number in range(3):
        sent = torch.full((SIZE,), number, dtype=torch.uint8)
        assert stage.specs[f"t{number}"].sha256 == tensor_checksum(sent)
        (written,) = stage.tensors.parameters[f"t{number}"].written  # type: ignore[attr-defined]
        assert torch.equal(written, sent)


def test_more_than_may_wait_is_hashed_meanwhile(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEW_CORES", True)
    monkeypatch.setattr(module, "KEPT_BYTES", 2 * SIZE)
    stage = stage_for(5)
    with stager.receiving():
        assert len(set(receive(stager, stage, 5))) < 5, "a bucket that was written is used again"
    stage.settle()
    assert len(stage.specs) == 5


def test_the_next_update_uses_the_same_buckets(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEW_CORES", True)
    places = []
    for _ in range(2):
        stage = stage_for(3)
        with stager.receiving():
            places.append(set(receive(stager, stage, 3)))
        stage.settle()
    assert places[0] == places[1]
    assert len(places[0]) == 3
