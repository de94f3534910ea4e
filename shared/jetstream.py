"""The connection to the broker: two channels and JetStream's JSON API.

Owns: two client connections a process (shared/channel.py), `bulk` for group payloads and `control` for everything that must not
wait behind them (measured: a small request behind large publishes on one connection waits 10 to 100 times longer).

Guarantees: a call ends within its deadline, in a result or in an error that names the broker's address or the subject and
what to do; a broker that cannot do what is needed is refused when it is met. tests/shared/test_jetstream.py holds this against a
real broker.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from shared import credentials
from shared.channel import Channel, redact
from shared.errors import ApiError, BrokerTooOld, NotJetStream, RequestTimeout, StorageExhausted

LEAST_LEVEL = 1
"""JetStream's own number of what it can do: 1 is nats-server 2.11, the first that lets a message have a time to live."""
STORAGE_CODES = {10002, 10023, 10028, 10047}

JetStreamReply = dict[str, Any]


class Connection:
    """What a process holds to talk to one broker: `bulk`, `control`, and the JSON API on `control`."""

    def __init__(self, bulk: Channel, control: Channel) -> None:
        self.bulk, self.control = bulk, control

    @classmethod
    async def open(
        cls, url: str, *, name: str, deadline_s: float = 10.0, options: Mapping[str, Any] | None = None
    ) -> Connection:
        """Connect and make sure that a JetStream answers that can do what is needed. `options` go to nats-py under its own names
        (tls, nkeys_seed, ...); without any, SLIPSTREAM_CREDENTIALS says who this process is (shared/credentials.py)."""
        options = credentials.options() if options is None else options
        bulk, control = (Channel(url, f"{name}/{kind}", options) for kind in ("bulk", "control"))
        deadline = time.monotonic() + deadline_s
        connection = cls(bulk, control)
        await control.open(deadline_s)
        try:
            await bulk.open(max(0.1, deadline - time.monotonic()))
            info = await connection.api("INFO", deadline_s=max(0.5, deadline - time.monotonic()))
            if int(info["api"].get("level", 0)) < LEAST_LEVEL:
                raise BrokerTooOld(redact(url), str(control.nc.connected_server_version).strip("<>"))
        except (RequestTimeout, ApiError) as error:
            await connection.close()
            raise NotJetStream(redact(url), str(error)) from error
        except BaseException:
            await connection.close()
            raise
        return connection

    def be_patient(self) -> None:
        """For services. A tool's user wants to hear that the broker is gone."""
        self.bulk.patient = self.control.patient = True

    @property
    def url(self) -> str:
        return redact(self.control.url)

    @property
    def connected(self) -> bool:
        return self.bulk.connected and self.control.connected

    async def api(self, verb: str, body: Mapping[str, Any] | None = None, deadline_s: float = 10.0) -> JetStreamReply:
        """Call `$JS.API.<verb>`, asking again over a restart of the broker. Raises ApiError with JetStream's own code."""
        payload = json.dumps(body).encode() if body is not None else b""
        frame = await self.control.request(f"$JS.API.{verb}", payload, deadline_s)
        reply: JetStreamReply = json.loads(frame.data)
        if error := reply.get("error"):
            raise api_error(error, f"$JS.API.{verb}", self.url)
        return reply

    async def close(self) -> None:
        for channel in (self.bulk, self.control):
            if hasattr(channel, "nc"):
                await channel.close()


def api_error(error: Mapping[str, Any], subject: str, url: str) -> ApiError | StorageExhausted:
    """JetStream's error object as an exception."""
    code, text = int(error.get("err_code", 0)), str(error.get("description", ""))
    if code in STORAGE_CODES or "no space" in text:
        return StorageExhausted(url, subject, f"{text} (err_code {code})")
    return ApiError(int(error.get("code", 0)), code, text, subject)
