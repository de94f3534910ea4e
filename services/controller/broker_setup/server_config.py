"""nats-server's configuration of one node, as text. Pure. tests/controller/test_broker_setup.py starts real servers on it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared import permissions

CLIENT_PORT, ROUTE_PORT, MONITOR_PORT = 4222, 6222, 8222


@dataclass(frozen=True, slots=True)
class Node:
    """What differs from node to node."""

    name: str
    folder: str
    """Where the node sees its certificates."""
    store: str
    port: int = CLIENT_PORT
    route_port: int = ROUTE_PORT
    monitor_port: int = MONITOR_PORT


def text(node: Node, peers: Sequence[str], keys: Mapping[str, str], runs: Sequence[str]) -> str:
    """The file. `peers`: host:port of all nodes' routes, none for a single node; `keys`: role -> public nkey."""
    parts = [HEAD, _server(node)]
    if peers:
        parts.append(_cluster(node, peers))
    parts.append(_users(keys, runs))
    return "\n".join(parts)


HEAD = """\
# Written by `slipstream broker init`, which overwrites it: run that again to add runs or hosts. After a change:
# nats-server --signal reload
"""


def _server(node: Node) -> str:
    return f"""\
server_name: {json.dumps(node.name)}
listen: "0.0.0.0:{node.port}"
http: "127.0.0.1:{node.monitor_port}"
max_payload: 1MB
max_pending: 256MB       # a replica that reads slowly for a while is not thrown out
ping_interval: "10s"
write_deadline: "10s"

jetstream {{
  store_dir: {json.dumps(node.store)}
  max_memory_store: 256MB  # only readers' positions are kept in memory
}}

tls {{
{_tls(node)}  timeout: 5
}}
"""


def _tls(node: Node) -> str:
    lines = {"cert_file": "server.pem", "key_file": "server.key", "ca_file": "ca.pem"}
    return "".join(f"  {key}: {json.dumps(f'{node.folder}/{name}')}\n" for key, name in lines.items())


def _cluster(node: Node, peers: Sequence[str]) -> str:
    routes = "".join(f"    {json.dumps(f'tls://{peer}')}\n" for peer in peers)
    return f"""\
cluster {{
  name: slipstream
  listen: "0.0.0.0:{node.route_port}"
  routes: [
{routes}  ]
  tls {{
{_tls(node)}    verify: true           # only nodes with a certificate of this authority join
    timeout: 5
  }}
}}
"""


def _users(keys: Mapping[str, str], runs: Sequence[str]) -> str:
    users = []
    for role, key in keys.items():
        may = json.dumps(permissions.of(role, runs), indent=2).replace("\n", "\n      ")
        users.append(f"    # {role}\n    {{ nkey: {key}, permissions: {may} }}\n")
    return "authorization {\n  timeout: 5\n  users: [\n" + "".join(users) + "  ]\n}\n"
