"""One JSON object a line: every metric and event of a run.

Guarantees: each message is in the file once, whenever the sink was killed: a half line at the end is cut off, and it goes on
behind the last message that is there. tests/sinks/test_sinks.py.

    {"stream": "metrics", "seq": 7, "at": ..., "service": "trainer", "replica": "trainer-0", "step": 3, "values": {...}}
    {"stream": "events", "seq": 2, "at": ..., "service": "rollout", "replica": "rollout-1", "kind": "joined", "message": ...,
     "detail": {...}}
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.sinks.follow import STREAMS, Position, Told


class JsonLines:
    """Appends to `file`. `position` says what it holds."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.position = Position()
        whole = self._scan(file) if file.exists() else 0
        self._file = file.open("r+b" if file.exists() else "wb")
        self._file.truncate(whole)
        self._file.seek(whole)

    def take(self, batch: list[Told]) -> None:
        lines = (json.dumps(plain(told), ensure_ascii=False, allow_nan=False) + "\n" for told in batch)
        self._file.write("".join(lines).encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _scan(self, file: Path) -> int:
        """Bytes of whole lines; the position comes from what is in them. ValueError for a file that is not ours."""
        whole = 0
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                try:
                    found = json.loads(line)
                    stream, seq = found["stream"], int(found["seq"])
                    self.position.seqs[stream] = max(self.position.seqs[stream], seq)
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"{file}:{number}: not a line of this sink (streams are {', '.join(STREAMS)}); choose another file"
                    ) from error
        return whole


def plain(told: Told) -> dict[str, Any]:
    """As JSON has it: a value that is no number becomes null."""
    return {"stream": told.stream, "seq": told.seq, **_clean(asdict(told.record))}


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
