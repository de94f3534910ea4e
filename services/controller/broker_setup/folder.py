"""The folder that `slipstream broker init` fills and keeps up to date.

    broker.json            what it was made for: runs, hosts, places
    authority/ca.pem, ca.key     signs the nodes' certificates; ca.key is needed by nobody else
    nodes/HOST/            for one node: server.conf, server.pem, server.key, ca.pem
    clients/ROLE/          for SLIPSTREAM_CREDENTIALS of one role: nkey, ca.pem, token (shared/credentials.py)

Guarantees: running it again keeps every key and token, adds what is new, and renews certificates that run out within a month.
tests/controller/test_broker_setup.py.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import nkeys

from services.controller.broker_setup import server_config
from services.controller.broker_setup.certificates import ensure_authority, ensure_node, write_private
from shared.config import ConfigError
from shared.permissions import ROLES
from shared.subjects import check_run_name

INTERFACES = ("controller", "dcs", "observer")
TOKENS = {
    "dcs": ("dcs", "controller"),
    "controller": ("controller",),
    "operator": ("controller",),
    "trainer": ("dcs",),
    "rollout": ("dcs",),
    "stage": ("dcs",),
    "observer": ("observer",),
}
"""Role -> the interfaces (an observer's is its /metrics) whose tokens it holds, the one that it sends first. So a replica cannot
order the controller about."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What broker.json says."""

    runs: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    """One a node."""
    also: list[str] = field(default_factory=list)
    """Further names and addresses under which any node is reached."""
    store: str = "/data"
    mounted_at: str = ""
    """Where a node sees its folder; '': where it is."""
    port: int = server_config.CLIENT_PORT
    days: int = 365


def read_plan(folder: Path) -> Plan:
    try:
        return Plan(**json.loads((folder / "broker.json").read_text()))
    except FileNotFoundError:
        return Plan()
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{folder / 'broker.json'}: cannot be read ({error}); restore it, or use another folder"
        ) from error


def extend(plan: Plan, runs: list[str], hosts: list[str], also: list[str], **places: object) -> Plan:
    """The plan with more runs and names, and other places where given. Raises ConfigError."""
    try:
        all_runs = list(dict.fromkeys([*plan.runs, *(check_run_name(run) for run in runs)]))
    except ValueError as error:
        raise ConfigError(f"--run: {error}") from error
    if not all_runs:
        raise ConfigError(
            "--run: name at least one run; its subjects are what the keys are good for. More can be added later"
        )
    nodes = hosts or plan.hosts or ["localhost"]
    if len(set(nodes)) != len(nodes) or len(nodes) not in (1, 3, 5):
        raise ConfigError(
            f"--host: {len(nodes)} nodes ({', '.join(nodes)}); a broker has 1, 3 or 5, each under its own name"
        )
    names = list(dict.fromkeys([*plan.also, *also]))
    changed = {name: value for name, value in places.items() if value is not None}
    return replace(plan, runs=all_runs, hosts=nodes, also=names, **changed)  # type: ignore[arg-type]


def write(folder: Path, plan: Plan) -> list[str]:
    """Bring the folder up to the plan. Returns what is new, a line each. Raises ConfigError if it cannot be written."""
    try:
        return _write(folder, plan)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write there ({error.strerror}: {error.filename})") from error


def _write(folder: Path, plan: Plan) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    news = [] if (folder / "authority").exists() else ["authority/: a new certificate authority"]
    authority = ensure_authority(folder / "authority")
    public = (folder / "authority" / "ca.pem").read_bytes()
    keys, made = _clients(folder / "clients", public)
    news += [f"clients/{role}/: a new key" for role in made]
    peers = [f"{host}:{server_config.ROUTE_PORT}" for host in plan.hosts] if len(plan.hosts) > 1 else []
    for host in plan.hosts:
        node = folder / "nodes" / host
        node.mkdir(parents=True, exist_ok=True)
        names = list(dict.fromkeys([host, *plan.also, "localhost", "127.0.0.1"]))
        if ensure_node(node, names, plan.days, authority):
            news.append(f"nodes/{host}/: a new certificate for {', '.join(names)}, {plan.days} days")
        (node / "ca.pem").write_bytes(public)
        seen = server_config.Node(host, plan.mounted_at or str(node.resolve()), plan.store, plan.port)
        text = server_config.text(seen, peers, keys, plan.runs)
        if not (node / "server.conf").exists() or (node / "server.conf").read_text() != text:
            (node / "server.conf").write_text(text)
            news.append(f"nodes/{host}/server.conf: a new configuration")
    (folder / "broker.json").write_text(json.dumps(asdict(plan), indent=2) + "\n")
    return news


def _clients(folder: Path, authority: bytes) -> tuple[dict[str, str], list[str]]:
    """Public key of every role, and the roles that were new."""
    tokens = {kind: _kept(folder / kind / "token") or secrets.token_urlsafe(32) for kind in INTERFACES}
    keys, made = {}, []
    for role in ROLES:
        place = folder / role
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (place / "nkey").exists():
            write_private(place / "nkey", nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER) + b"\n")
            made.append(role)
        pair = nkeys.from_seed(bytearray((place / "nkey").read_bytes().strip()))
        keys[role] = pair.public_key.decode()
        (place / "ca.pem").write_bytes(authority)
        if role in TOKENS:
            lines = "".join(f"{tokens[kind]}\n" for kind in TOKENS[role])
            write_private(place / "token", lines.encode())
    return keys, made


def _kept(file: Path) -> str:
    """The token that an interface has already."""
    return file.read_text().split()[0] if file.exists() else ""
