"""An engine for the whole session, and brokers' images on it. `make test-broker`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.deploy.engine import broker_image, engine


@pytest.fixture(scope="session")
def image() -> Iterator[Callable[[str], str]]:
    """`image("2.11.0")`: the name of an image with that nats-server."""

    def of(version: str) -> str:
        name = f"nats:{version}-alpine"
        broker_image(name, version)
        return name

    with engine("leave `make test-broker` out"):
        yield of
