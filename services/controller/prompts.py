"""Where prompts come from, and in which order.

A source is a JSON-lines file, a Parquet file, a user's function `prompts(seed, index)`, or `reasoning_gym:NAME`. The order of an
epoch is drawn from (seed, epoch) alone and any place of it can be looked up, so a restarted controller goes on exactly where the
receipts say it was. A record that cannot be used is a ConfigError that names the file, the line or row, and the field.
`tests/controller/test_prompts.py` holds the order, the random access and the errors.

What reaches the group: the prompt (a string, or chat messages if the run file has a system prompt), the answer, and as `meta`
every other field of the record.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shared.config import ConfigError, RunConfig
from shared.sections import DataConfig

REASONING_GYM = "reasoning_gym:"
GYM_CHUNK = 1000
"""Items of one procedural data set when the source has no `size`; some of them plan their whole size ahead."""
PLAIN = (int, float, bool, type(None))

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What becomes a group."""

    prompt: str | list[dict[str, Any]]
    answer: Any
    meta: dict[str, Any]


class Records(Protocol):
    """Records by number."""

    @property
    def size(self) -> int | None:
        """How many there are; None: as many as one likes."""

    def record(self, index: int) -> tuple[Record, str]:
        """Record `index` and how a person finds it."""


class PromptSource:
    """The prompts of `data`, which is the section `field` of the run file. Opening it reads and checks a whole file."""

    def __init__(self, config: RunConfig, data: DataConfig, field: str = "prompts") -> None:
        self.data, self.seed = data, config.seed
        self._records = open_records(config, data, field)
        self.size = _size(self._records.size, data.size, f"{field}.size")

    def at(self, position: int) -> Prompt:
        """The prompt at `position` of the data order, counted on over epochs."""
        epoch, index = divmod(position, self.size) if self.size else (0, position)
        if self.data.shuffle and self.size:
            index = int(_permutation(self.seed, epoch, self.size)[index])
        return self.record(index)

    def record(self, index: int) -> Prompt:
        """The prompt of record `index` of the source, in the source's own order."""
        record, where = self._records.record(index)
        return to_prompt(record, where, self.data)


def to_prompt(record: Any, where: str, data: DataConfig) -> Prompt:
    """Pick a record apart."""
    if not isinstance(record, dict):
        raise ConfigError(
            f"{where}: expected an object with the field {data.prompt_key!r}, got {type(record).__name__}"
        )
    if data.prompt_key not in record:
        known = ", ".join(map(str, record)) or "none"
        raise ConfigError(f"{where}: no field {data.prompt_key!r} (prompt_key); its fields are {known}")
    meta = {key: value for key, value in record.items() if key not in (data.prompt_key, data.answer_key)}
    prompt, answer = (
        check_prompt(record[data.prompt_key], f"{where}, field {data.prompt_key!r}"),
        record.get(data.answer_key),
    )
    check_plain(answer, f"{where}, field {data.answer_key!r}")
    for key, value in meta.items():
        check_plain(value, f"{where}, field {key!r}")
    if isinstance(prompt, str) and data.system_prompt is not None:
        prompt = [{"role": "system", "content": data.system_prompt}, {"role": "user", "content": prompt}]
    return Prompt(prompt, answer, meta)


def check_prompt(value: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str) and value:
        check_plain(value, where)
        return value
    if isinstance(value, list) and value:
        for number, message in enumerate(value):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise ConfigError(f"{where}: message {number} needs a role and a content, got {message!r:.80}")
        check_plain(value, where)
        return value
    raise ConfigError(f"{where}: expected a string or a list of chat messages that is not empty, got {value!r:.80}")


def check_plain(value: Any, where: str) -> None:
    """ConfigError unless `value` can travel: strings, numbers, None, and lists and maps of them."""
    if isinstance(value, list):
        for item in value:
            check_plain(item, where)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{where}: the key {key!r:.40} of a map is no string")
            check_plain(item, f"{where}, {key!r}")
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{where}: not Unicode text: half a surrogate pair at character {error.start}") from error
    elif not isinstance(value, PLAIN) or (isinstance(value, int) and not -(1 << 63) <= value < 1 << 64):
        raise ConfigError(
            f"{where}: {type(value).__name__} {value!r:.40} cannot travel; use strings, numbers, lists and maps"
        )


def open_records(config: RunConfig, data: DataConfig, field: str) -> Records:
    """The source by the form of its name."""
    name = data.source
    if name.startswith(REASONING_GYM):
        return ReasoningGymRecords(name.removeprefix(REASONING_GYM), config.seed, field, data)
    if name.endswith(".jsonl"):
        return JsonLines(config.path(name), data)
    if name.endswith(".parquet"):
        return Parquet(config.path(name), data)
    if "/" in name or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            f"{field}.source: {name!r} is neither a .jsonl or .parquet file, nor a dotted path, nor {REASONING_GYM}NAME"
        )
    return FunctionRecords(config.function(name, f"{field}.source"), config.seed, data, f"{field}.source")


class JsonLines:
    """One JSON object a line. Every line is checked once at the start; afterwards a record is read from its place in the file."""

    def __init__(self, path: Path, data: DataConfig) -> None:
        self.path = path
        self._places: list[tuple[int, int, int]] = []
        """(line number from 1, first byte, length) of each record."""
        place = 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        to_prompt(self._parse(line, number), f"{path} line {number}", data)
                        self._places.append((number, place, len(line)))
                    place += len(line)
        except OSError as error:
            raise ConfigError(f"{path}: cannot read the prompts ({error.strerror})") from error
        if not self._places:
            raise ConfigError(f"{path}: holds no record")
        self.size = len(self._places)

    def record(self, index: int) -> tuple[Record, str]:
        number, place, length = self._places[index]
        with self.path.open("rb") as file:
            file.seek(place)
            return self._parse(file.read(length), number), f"{self.path} line {number}"

    def _parse(self, line: bytes, number: int) -> Any:
        try:
            return json.loads(line)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.path} line {number}: not UTF-8 text ({error.reason})") from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"{self.path} line {number}: not JSON: {error.msg} at column {error.colno}") from error


class Parquet:
    """One record a row, held in memory as columns."""

    def __init__(self, path: Path, data: DataConfig) -> None:
        import pyarrow
        import pyarrow.parquet

        self.path = path
        try:
            self._table = pyarrow.parquet.read_table(path).combine_chunks()
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(f"{path}: cannot read the prompts ({error})") from error
        if not self._table.num_rows:
            raise ConfigError(f"{path}: holds no record")
        self.size: int = self._table.num_rows
        row = 0
        for batch in self._table.to_batches(max_chunksize=1024):
            for record in batch.to_pylist():
                to_prompt(record, f"{path} row {row}", data)
                row += 1

    def record(self, index: int) -> tuple[Record, str]:
        return self._table.slice(index, 1).to_pylist()[0], f"{self.path} row {index}"


class FunctionRecords:
    """A user's function of (seed, index)."""

    size = None

    def __init__(self, function: Callable[..., Any], seed: int, data: DataConfig, field: str) -> None:
        self._function, self._seed, self._data, self._field = function, seed, data, field

    def record(self, index: int) -> tuple[Record, str]:
        where = f"{self._field}: {self._data.source}({self._seed}, {index})"
        try:
            return self._function(self._seed, index, **self._data.options), where
        except Exception as error:  # a user's code: whatever it raises is told under the name of the field
            raise ConfigError(f"{where} raised {type(error).__name__}: {error}") from error


class ReasoningGymRecords:
    """A task of the package reasoning_gym, made from (seed, index). `meta` says how to make the item again: the scorer
    `services.reward.rewards.reasoning_gym.score` does. `field` enters the seed, so that held-out items are others."""

    size = None

    def __init__(self, name: str, seed: int, field: str, data: DataConfig) -> None:
        self._name, self._data = name, data
        self._seed = zlib.crc32(f"{seed}/{field}".encode())
        self._chunk = data.size or GYM_CHUNK
        try:
            import reasoning_gym
        except ImportError as error:
            raise ConfigError(
                f"{field}.source: needs the package reasoning-gym ({error}); pip install reasoning-gym"
            ) from error
        self._make = lru_cache(maxsize=8)(
            lambda seed: reasoning_gym.create_dataset(name, seed=seed, size=self._chunk, **data.options)
        )
        self._where = f"{field}.source: {data.source}"
        self.record(0)

    def record(self, index: int) -> tuple[Record, str]:
        chunk, item = divmod(index, self._chunk)
        seed = (self._seed + chunk * self._chunk) % (1 << 31)
        try:
            entry = self._make(seed)[item]
        except Exception as error:  # a hundred tasks with as many ways to refuse their options
            raise ConfigError(f"{self._where}: item {index} cannot be made: {type(error).__name__}: {error}") from error
        meta = {"task": self._name, "seed": seed, "size": self._chunk, "index": item, "options": self._data.options}
        record = {self._data.prompt_key: entry["question"], self._data.answer_key: str(entry["answer"])}
        return {**record, "reasoning_gym": meta}, f"{self._where} item {index}"


def _size(held: int | None, wanted: int | None, field: str) -> int | None:
    if held is not None and wanted is not None and wanted > held:
        raise ConfigError(f"{field}: {wanted}, but the source holds {held} records; lower it or leave it out")
    return wanted or held


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed % (1 << 63), epoch]).permutation(size)
