"""Fixtures that every test may use: real brokers on free loopback ports, and names that do not meet.

Hypothesis draws the same examples at every run and knows no deadline: what a commit is refused for is the commit's, neither the
chance's nor the machine's. `pytest --hypothesis-profile=default` searches at random.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from shared.broker import EmbeddedBroker
from shared.jetstream import Connection

settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")

ROOMY = {"jetstream": {"max_file_store": 1 << 42}}
"""Streams reserve what they may grow to, and many runs of tests share a broker."""


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """One broker for the whole session. Nobody kills it; a run name of its own keeps each test apart."""
    with EmbeddedBroker(tmp_path_factory.mktemp("broker"), options=ROOMY, tied=True) as running:
        yield running


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A broker of this test alone, which may be killed and restarted."""
    with EmbeddedBroker(tmp_path / "broker", options=ROOMY, tied=True) as running:
        yield running


@pytest.fixture
def run_name() -> str:
    """A run that no other test has."""
    return f"t{uuid.uuid4().hex[:10]}"


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., Awaitable[Connection]]]:
    """`await connect(broker.url)`: connections that are closed when the test ends."""
    opened: list[Connection] = []

    async def open_one(url: str, name: str = "test", **options: object) -> Connection:
        connection = await Connection.open(url, name=name, **{"deadline_s": 60.0, **options})  # type: ignore[arg-type]
        opened.append(connection)
        return connection

    yield open_one
    for connection in opened:
        await connection.close()
