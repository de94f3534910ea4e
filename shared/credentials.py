"""Who this process is to the broker: the folder that SLIPSTREAM_CREDENTIALS names, as `slipstream broker init` writes it.

    nkey         the seed of its key
    user.creds   or a JWT with its key, as NATS hands them out
    ca.pem       the authority of the broker's certificate; from then on nothing is sent in the clear
    client.pem, client.key   its own certificate, where the broker asks for one
    token        what the services' HTTP interfaces ask for (shared/http_auth.py)

Every process of a run gets it by its environment, and so do the processes that it starts. tests/controller/test_broker_setup.py.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any

from shared.config import ConfigError
from shared.permissions import ROLES

CREDENTIALS = "SLIPSTREAM_CREDENTIALS"
KNOWN = ("nkey", "user.creds", "ca.pem", "client.pem", "token")


def folder() -> Path | None:
    """The folder, or None where there is none to be. ConfigError if it is not what it should be."""
    value = os.environ.get(CREDENTIALS, "")
    if not value:
        return None
    path = Path(value)
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise ConfigError(f"{CREDENTIALS}: cannot read the folder {path} ({error.strerror})") from error
    if not names & set(KNOWN):
        raise ConfigError(f"{CREDENTIALS}: the folder {path} holds none of {', '.join(KNOWN)}")
    return path


def of_service(service: str) -> dict[str, str]:
    """The environment of a service that this process starts: its own role's folder where it lies beside this process's, as
    `slipstream broker init` puts them."""
    place = folder()
    role = next((name for name, role in ROLES.items() if service in role.services), service)
    if place is None or not (place.resolve().parent / role / "nkey").is_file():
        return {}
    return {CREDENTIALS: str(place.resolve().parent / role)}


def options() -> dict[str, Any]:
    """What nats-py is to be told. Raises ConfigError, naming the file."""
    place = folder()
    if place is None:
        return {}
    found: dict[str, Any] = {}
    if (seed := place / "nkey").exists():
        found["nkeys_seed_str"] = _seed(seed)
    elif (jwt := place / "user.creds").exists():
        found["user_credentials"] = str(jwt)
    if (authority := place / "ca.pem").exists():
        found["tls"] = _tls(authority, place / "client.pem", place / "client.key")
    return found


def _seed(file: Path) -> str:
    try:
        import nkeys
    except ModuleNotFoundError as error:
        raise ConfigError(f"{CREDENTIALS}: {file} needs the package nkeys: pip install 'nats-py[nkeys]'") from error
    try:
        seed = file.read_text().strip()
        nkeys.from_seed(bytearray(seed.encode())).wipe()
    except OSError as error:
        raise ConfigError(f"{CREDENTIALS}: cannot read {file} ({error.strerror})") from error
    except (nkeys.NkeysError, ValueError) as error:
        raise ConfigError(f"{CREDENTIALS}: {file} holds no seed of an nkey, which begins with SU") from error
    return seed


def _tls(authority: Path, certificate: Path, key: Path) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{CREDENTIALS}: {authority} holds no certificate that can be read ({error})") from error
    if certificate.exists():
        try:
            context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{CREDENTIALS}: {certificate} and {key.name} are no pair that can be read ({error})"
            ) from error
    return context
