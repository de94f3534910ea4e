"""The token of the HTTP interfaces, over real sockets where it matters."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from shared import http_auth
from shared.config import ConfigError
from shared.http_server import listen, serving
from shared.network import http_url, is_loopback, own_address


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (http_auth.TOKEN, http_auth.CREDENTIALS):
        monkeypatch.delenv(name, raising=False)


def make_app() -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @app.get("/secret")
    async def secret() -> str:
        return "told"

    return app


@pytest.mark.parametrize(
    ("host", "own"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.5", "dcs")),
    ],
)
def test_what_is_loopback(host: str, own: bool) -> None:
    assert is_loopback(host) is own


async def test_it_answers_who_has_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(http_auth.TOKEN, "s3cret another")
    app = http_auth.guard(make_app(), "0.0.0.0", "dcs")
    async with (
        serving(app, listen("127.0.0.1", 0, "dcs")) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        missing = await client.get("/secret")
        assert (missing.status_code, missing.headers["www-authenticate"]) == (401, "Bearer")
        assert "Authorization: Bearer" in missing.json()["detail"]
        for value in ("Bearer wrong", "Bearer s3cret-and-more", "Bearer s3cr"):
            wrong = await client.get("/secret", headers={"Authorization": value})
            assert wrong.status_code == 401
            assert "not the one of this service" in wrong.json()["detail"]
        for value in ("s3cret", "Basic s3cret", "Bearer"):
            assert "asks for a token" in (await client.get("/secret", headers={"Authorization": value})).text
        assert (await client.get("/openapi.json")).status_code == 401
        assert (await client.get("/health")).json() == "ok"
        assert (await client.get("/secret", headers=http_auth.headers())).json() == "told"
        assert (await client.get("/secret", headers={"Authorization": "bearer another"})).json() == "told"


async def test_loopback_needs_none() -> None:
    app = make_app()
    assert http_auth.guard(app, "127.0.0.1", "dcs") is app
    assert http_auth.headers() == {}


def test_seen_from_outside_it_does_not_start_without_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"controller\.host: 0\.0\.0\.0 .* set SLIPSTREAM_TOKEN"):
        http_auth.guard(make_app(), "0.0.0.0", "controller")
    monkeypatch.setenv(http_auth.CREDENTIALS, str(tmp_path))
    (tmp_path / "ca.pem").write_text("")
    with pytest.raises(ConfigError, match="needs a token"):
        http_auth.guard(make_app(), "0.0.0.0", "controller")


def test_the_token_may_lie_with_the_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(http_auth.CREDENTIALS, str(tmp_path))
    (tmp_path / "token").write_text("of-the-file\n")
    assert http_auth.headers() == {"Authorization": "Bearer of-the-file"}
    monkeypatch.setenv(http_auth.TOKEN, "of-the-environment")
    assert http_auth.tokens() == ["of-the-environment"]


def test_listening_everywhere_it_is_told_by_the_way_to_the_broker() -> None:
    with listen("0.0.0.0", 0, "dcs") as listener:
        port = listener.getsockname()[1]
        assert http_url(listener, "nats://user:***@127.0.0.1:4222,nats://b:4222") == f"http://127.0.0.1:{port}"
    with listen("127.0.0.1", 0, "dcs") as listener:
        assert http_url(listener, "nats://10.0.0.5:4222").startswith("http://127.0.0.1:")
    assert own_address("localhost") in ("127.0.0.1", "::1")
