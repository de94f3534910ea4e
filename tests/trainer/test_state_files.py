"""Pieces that several ranks wrote read back as the tensors they are of, whole or in any other cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.trainer.state_files import file_of, key_of, open_state, write, write_behind
from services.trainer.tensorfile import DiskFullError
from tests.trainer.test_tensorfile import file_size_limit

ROWS, COLUMNS, WHOLE = torch.randn(10, 4), torch.randn(3, 8), torch.randn(6, 6)


def cut(name: str, tensor: torch.Tensor, dim: int, parts: int) -> list[tuple[str, torch.Tensor]]:
    size = tensor.shape[dim] // parts
    return [(key_of(name, dim, start), tensor.narrow(dim, start, size)) for start in range(0, tensor.shape[dim], size)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks wrote."""
    rows, columns = cut("rows", ROWS, 0, 5), cut("a/columns", COLUMNS, 1, 2)
    mine, others = [rows[1], columns[0], rows[4]], [rows[3], rows[0], columns[1], rows[2]]
    write(tmp_path / file_of(0), [*mine, ("whole", WHOLE), ("steps", torch.tensor(7))])
    write(tmp_path / file_of(1), others)
    return tmp_path


def test_whole_tensors(folder: Path) -> None:
    with open_state(folder) as state:
        assert set(state.names()) == {"rows", "a/columns", "whole", "steps"}
        for name, tensor in {"rows": ROWS, "a/columns": COLUMNS, "whole": WHOLE, "steps": torch.tensor(7)}.items():
            assert torch.equal(state.whole(name), tensor)
            assert state.shape(name) == tuple(tensor.shape)


def test_any_part_of_any_tensor(folder: Path) -> None:
    with open_state(folder) as state:
        for name, tensor in {"rows": ROWS, "a/columns": COLUMNS, "whole": WHOLE}.items():
            for dim, extent in enumerate(tensor.shape):
                for start in range(extent):
                    for size in range(1, extent - start + 1):
                        expected = tensor.narrow(dim, start, size)
                        assert torch.equal(state.part(name, dim, start, size), expected), (name, dim, start, size)


def test_a_missing_piece_is_noticed(folder: Path) -> None:
    (folder / file_of(0)).unlink()
    with pytest.raises(ValueError, match="pieces of .* do not fit together"), open_state(folder):
        pass


def test_written_behind_and_let_go(tmp_path: Path) -> None:
    tensors = [("a", ROWS), ("b", COLUMNS)]
    written = write_behind(tmp_path / file_of(0), tensors).result(30)
    assert written["size"] == (tmp_path / file_of(0)).stat().st_size
    assert not tensors
    with open_state(tmp_path) as state:
        assert torch.equal(state.whole("b"), COLUMNS)


def test_what_goes_wrong_behind_is_told(tmp_path: Path) -> None:
    with file_size_limit(1 << 10), pytest.raises(DiskFullError, match="no room to write"):
        write_behind(tmp_path / file_of(0), [("a", torch.zeros(10_000))]).result(30)
    assert list(tmp_path.iterdir()) == []
