"""Prompt sources: order, random access, and errors that name file, line and field."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa
import pyarrow.parquet
import pytest

from services.controller.prompts import Prompt, PromptSource
from shared.config import ConfigError, RunConfig, parse

ROWS = [{"prompt": f"p{i}", "answer": str(i), "level": i % 3} for i in range(10)]


def run_config(base: Path, seed: int = 0, **prompts: Any) -> RunConfig:
    data = {"run": "t", "steps": 1, "groups_per_step": 1, "samples_per_group": 2, "base": str(base), "seed": seed}
    data |= {"model": {"path": "m"}, "reward": {"functions": [{"path": "a.b"}]}}
    return parse({**data, "prompts": prompts}, "test")


def opened(base: Path, seed: int = 0, field: str = "prompts", **prompts: Any) -> PromptSource:
    config = run_config(base, seed, **prompts)
    return PromptSource(config, config.prompts, field)


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    text = "\n\n".join(json.dumps(row) for row in ROWS)
    (tmp_path / "rows.jsonl").write_text(text + "\n")
    return tmp_path


def test_order_is_drawn_anew_each_epoch_and_only_from_the_seed(jsonl: Path) -> None:
    source = opened(jsonl, source="rows.jsonl")
    assert source.size == 10
    epochs = [[source.at(epoch * 10 + i).prompt for i in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == [f"p{i}" for i in range(10)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = opened(jsonl, source="rows.jsonl")
    assert [again.at(i).prompt for i in reversed(range(30))] == [p for epoch in epochs for p in epoch][::-1]
    assert [opened(jsonl, seed=1, source="rows.jsonl").at(i).prompt for i in range(10)] != epochs[0]


def test_records_in_full(jsonl: Path) -> None:
    source = opened(jsonl, source="rows.jsonl", shuffle=False, size=4)
    assert [source.at(i).prompt for i in range(6)] == ["p0", "p1", "p2", "p3", "p0", "p1"]
    assert source.at(2) == Prompt("p2", "2", {"level": 2})


def test_system_prompt_makes_chat_messages(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "one"}) + "\n" + json.dumps({"q": chat}) + "\n")
    source = opened(tmp_path, source="rows.jsonl", prompt_key="q", system_prompt="Be brief.", shuffle=False)
    first = source.at(0)
    assert first.answer is None
    assert first.prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    assert source.at(1).prompt == chat


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"prompt": "a"', "not JSON"),
        ('["a"]', "expected an object with the field 'prompt', got list"),
        ('{"question": "a"}', "no field 'prompt' (prompt_key); its fields are question"),
        ('{"prompt": ""}', "field 'prompt': expected a string or a list of chat messages"),
        ('{"prompt": 3}', "field 'prompt': expected a string"),
        ('{"prompt": [{"content": "a"}]}', "field 'prompt': message 0 needs a role and a content"),
        ('{"prompt": "a", "big": 99999999999999999999}', "field 'big': int 99999999999999999999 cannot travel"),
        ('{"prompt": "\\ud83d"}', "field 'prompt': not Unicode text"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path, source="rows.jsonl")
    assert f"{tmp_path}/rows.jsonl line 2" in str(caught.value)
    assert told in str(caught.value)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "bad.jsonl").write_bytes(b'{"prompt": "\xff\xfe"}\n')
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    (tmp_path / "one.jsonl").write_text('{"prompt": "a"}')
    for source, told in [
        ("none.jsonl", "No such file"),
        ("empty.jsonl", "holds no record"),
        ("bad.jsonl", "line 1: not UTF-8"),
        ("bad.parquet", "cannot read the prompts"),
        ("none.parquet", "cannot read the prompts"),
        ("data/prompts", "prompts.source: 'data/prompts' is neither"),
        ("no_such_module.prompts", "cannot import"),
    ]:
        with pytest.raises(ConfigError, match=told):
            opened(tmp_path, source=source)
    with pytest.raises(ConfigError, match=r"prompts\.size: 2, but the source holds 1 records"):
        opened(tmp_path, source="one.jsonl", size=2)


def test_parquet(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    source = opened(tmp_path, source="rows.parquet", shuffle=False)
    assert [source.at(i).prompt for i in range(12)] == [f"p{i % 10}" for i in range(12)]
    assert source.at(4) == Prompt("p4", "4", {"level": 1})
    rows = [{"prompt": "a", "day": None}, {"prompt": "b", "day": datetime.date(2020, 1, 2)}]
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "days.parquet")
    with pytest.raises(ConfigError, match=r"days\.parquet row 1, field 'day': date .* cannot travel"):
        opened(tmp_path, source="days.parquet")


def test_function(tmp_path: Path) -> None:
    (tmp_path / "my_prompts_e.py").write_text(
        "def prompts(seed, index, top=5):\n    return {'prompt': f'{seed}/{index}/{top}', 'answer': 10 // (index - 7)}\n"
    )
    source = opened(tmp_path, seed=3, source="my_prompts_e.prompts", options={"top": 9})
    assert source.size is None
    assert source.at(2) == Prompt("3/2/9", -2, {})
    with pytest.raises(ConfigError, match=r"my_prompts_e\.prompts\(3, 7\) raised ZeroDivisionError"):
        source.at(7)


def test_reasoning_gym_is_made_from_seed_and_index(tmp_path: Path) -> None:
    from services.reward.rewards.reasoning_gym import score

    source = opened(tmp_path, source="reasoning_gym:chain_sum", options={"min_terms": 2, "max_terms": 3})
    assert source.size is None
    for position in (0, 999, 1000, 123456):
        item = source.at(position)
        assert item == opened(tmp_path, source="reasoning_gym:chain_sum", options={"min_terms": 2, "max_terms": 3}).at(
            position
        )
        meta = msgpack.unpackb(msgpack.packb(item.meta))
        assert score(completion=item.answer, meta=meta) == 1.0
        assert score(completion="none", meta=meta) < 1.0
    items = {str(source.at(i).prompt) for i in range(990, 1010)}
    held_out = opened(tmp_path, source="reasoning_gym:chain_sum", field="eval.prompts", size=20)
    assert len(items) == 20
    assert held_out.size == 20
    assert not items & {str(held_out.at(i).prompt) for i in range(20)}
    with pytest.raises(ConfigError, match=r"reasoning_gym:no_such_task: item 0 cannot be made"):
        opened(tmp_path, source="reasoning_gym:no_such_task")
