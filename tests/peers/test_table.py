"""Every test that the table names exists, and the table names enough of them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = [
    line for line in Path(__file__).with_name("README.md").read_text().splitlines() if "`tests/" in line and "|" in line
]
NAMED = sorted({name for row in ROWS for name in re.findall(r"`(tests/[\w/]+\.py::\w+)`", row)})


def test_the_table_is_long_enough() -> None:
    assert len(ROWS) >= 20
    assert len({row.split("|")[1] for row in ROWS}) == len(ROWS), "each kind of fault once"


def test_every_test_that_it_names_exists() -> None:
    missing = []
    for name in NAMED:
        path, _, function = name.partition("::")
        file = ROOT / path
        if not file.is_file() or not re.search(rf"def {function}\(", file.read_text()):
            missing.append(name)
    assert missing == []
