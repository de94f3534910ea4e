"""No call over a network without a deadline: one client without a time-out held an orchestrator up for 43 hours."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("shared/**/*.py"), *ROOT.glob("services/**/*.py")])
HTTP = {"request", "get", "post", "put", "delete", "patch", "head"}
SESSIONS = {"session", "_session", "self._session"}


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def name_of(node: ast.expr) -> str:
    return ast.unparse(node)


def without_deadline(source: str) -> list[int]:
    """Lines of calls that could wait for ever."""
    found = []
    for call in calls(ast.parse(source)):
        name, given = name_of(call.func), {keyword.arg for keyword in call.keywords}
        owner, _, method = name.rpartition(".")
        over_http = method in HTTP and owner in SESSIONS
        blocking = method in ("urlopen", "create_connection") and owner.split(".")[0] in ("urllib", "socket", "request")
        if (over_http or blocking) and "timeout" not in given and None not in given:
            found.append(call.lineno)
    return sorted(found)


def test_the_rule_finds_what_it_should() -> None:
    bad = "async def f(self):\n    async with self._session.get(url) as a:\n        pass\n    urllib.request.urlopen(url)\n"
    assert without_deadline(bad) == [2, 4]
    good = "session.post(url, json=body, timeout=t)\nkv.get(key)\nself._session.request(m, u, **options)\n"
    assert without_deadline(good) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_call_over_a_network_has_a_deadline(path: Path) -> None:
    assert without_deadline(path.read_text()) == []
