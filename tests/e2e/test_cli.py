"""The command line: what it says of itself, and what it says of mistakes. Each error is one line a person can act on."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from services.controller.attach import attach
from services.controller.cli import app
from services.controller.launchers.broker import PrivateBroker, serving
from services.controller.launchers.resume import settle
from shared.broker import EmbeddedBroker, find_binary
from shared.config import load
from shared.sections import BrokerConfig
from tests.shared.runs import until

TASK = """
def prompts(seed, index):
    return {"prompt": f"{index}+1=", "answer": str(index + 1)}

def reward(prompt, completion, answer, finish):
    return float(completion == answer)

def build_model(path, seed):
    raise AssertionError("validate must not build")

def no_arguments():
    return 1.0

def wants_more(prompt, completion, answer, *, strictness):
    return 1.0

def demonstrations(seed, index):
    return {"prompt": "a"}

def broken(seed, index):
    raise KeyError("nothing there")
"""

RUN = {
    "run": "cli-test",
    "steps": 4,
    "groups_per_step": 4,
    "samples_per_group": 2,
    "model": {"path": "model", "build": "cli_task.build_model"},
    "prompts": {"source": "cli_task.prompts"},
    "reward": {"functions": [{"path": "cli_task.reward"}]},
    "workdir": "{base}/work",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "cli_task.py").write_text(TASK)
    yield tmp_path
    sys.modules.pop("cli_task", None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


def write(folder: Path, **changes) -> str:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({**RUN, "workdir": str(folder / "work"), **changes}))
    return str(path)


def slipstream(*arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command in this process."""
    result = CliRunner().invoke(app, list(arguments), prog_name="slipstream", env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


def test_help_teaches_and_loads_nothing_heavy():
    code_of_exit, text, _ = slipstream("--help")
    assert code_of_exit == 0
    assert "slipstream up run.yaml" in text
    code = "import services.controller.cli, sys; print([m for m in ('torch', 'numpy', 'nats', 'pydantic') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert loaded.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["up", "validate", "status", "watch", "events", "audit", "serve", "weights"])
def test_every_command_explains_itself_with_an_example(command):
    code, text, _ = slipstream(command, "--help")
    assert code == 0
    assert f"slipstream {command} " in text.split("Usage:")[1].split("\n", 1)[1]


def test_validate_tells_what_the_run_comes_down_to(folder):
    code, text, _ = slipstream("validate", write(folder), "--set", "max_staleness=3", "--set", "window=2")
    assert code == 0
    assert "no trained token is older than 3 updates" in text
    assert "15 groups on the way at once (window 2)" in text
    assert text.endswith("nothing wrong\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grups_per_step": 4}, "grups_per_step: unknown field; did you mean 'groups_per_step'?"),
        ({"steps": "many"}, "steps: Input should be a valid integer"),
        ({"groups_per_step": 0}, "groups_per_step: Input should be greater than or equal to 1"),
        ({"prompts": {"source": "none.jsonl"}}, "none.jsonl"),
        ({"prompts": {"source": "cli_task.nothing"}}, "prompts.source: cannot import 'cli_task.nothing'"),
        ({"reward": {"functions": [{"path": "no_module_here.reward"}]}}, "reward.functions.0.path: cannot import"),
        ({"reward": {"functions": [{"path": "cli_task.wants_more"}]}}, "asks for 'strictness'"),
        (
            {"reward": {"functions": [{"path": "cli_task.reward", "options": {"case": 1}}]}},
            "does not take the option 'case'",
        ),
        ({"model": {"path": "nowhere"}}, "model.path: "),
        ({"model": {"path": "nowhere", "build": "cli_task.no_arguments"}}, "cannot be called with (path, seed)"),
        (
            {"trainer": {"warm_start": {"source": "cli_task.demonstrations", "steps": 1}}},
            "expected {'prompt': ..., 'completion': ...}",
        ),
        ({"trainer": {"warm_start": {"source": "cli_task.broken", "steps": 1}}}, "KeyError: 'nothing there'"),
    ],
)
def test_validate_names_the_field(folder, changes, message):
    code, _, errors = slipstream("validate", write(folder, **changes))
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors


def test_validate_reads_the_prompts(folder):
    (folder / "data.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer"\n')
    code, _, errors = slipstream("validate", write(folder, prompts={"source": "data.jsonl"}))
    assert code == 2
    assert "data.jsonl" in errors
    assert "line 2" in errors or ":2" in errors


def test_validate_refuses_a_model_of_an_unknown_family(folder):
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text('{"model_type": "perceptron"}')
    code, _, errors = slipstream("validate", write(folder))
    assert code == 2
    assert "perceptron" in errors


def test_validate_finds_everything_at_once(folder):
    changes = {"model": {"path": "nowhere"}, "prompts": {"source": "cli_task.nothing"}}
    _, _, errors = slipstream("validate", write(folder, **changes))
    assert "model.path" in errors
    assert "prompts.source" in errors


@pytest.mark.parametrize("command", ["validate", "up"])
def test_a_run_file_that_is_not_there(command):
    code, _, errors = slipstream(command, "no-such-run.yaml")
    assert code == 2
    assert "no-such-run.yaml: cannot read the run file" in errors


def test_a_set_that_is_no_setting(folder):
    code, _, errors = slipstream("validate", write(folder), "--set", "steps")
    assert code == 2
    assert "write it as a.b=value" in errors


@pytest.mark.parametrize("command", ["status", "audit", "events", "watch"])
def test_which_run(command):
    code, _, errors = slipstream(command)
    assert code == 2
    assert "--nats URL and --run NAME" in errors


def test_a_run_that_was_never_started(folder):
    code, _, errors = slipstream("audit", write(folder))
    assert code == 3
    assert "Start it with `slipstream up`" in errors


def test_a_run_that_the_broker_does_not_know(broker):
    code, _, errors = slipstream("status", "--nats", broker.url, "--run", "nobodys")
    assert code == 2
    assert "nobodys_config" in errors


def test_no_broker(monkeypatch):
    monkeypatch.setattr("services.controller.attach.CONNECT_DEADLINE_S", 0.5)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        code, _, errors = slipstream("audit", "--nats", f"nats://127.0.0.1:{probe.getsockname()[1]}", "--run", "demo")
    assert code == 3
    assert "no broker at nats://127.0.0.1:" in errors


async def test_a_broker_without_jetstream(tmp_path):
    log = tmp_path / "log"
    plain = subprocess.Popen([str(find_binary()), "-a", "127.0.0.1", "-p", "-1", "-l", str(log)])  # noqa: ASYNC220
    try:
        await until(
            lambda: log.exists() and "Listening for client connections on" in log.read_text(), "the server listens"
        )
        port = log.read_text().split("Listening for client connections on 127.0.0.1:")[1].split()[0]
        command = [
            sys.executable,
            "-m",
            "services.controller.cli",
            "audit",
            "--run",
            "demo",
            "--nats",
            f"nats://127.0.0.1:{port}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)  # noqa: ASYNC221
    finally:
        plain.terminate()
        plain.wait(60)
    assert done.returncode == 3
    assert "has no JetStream" in done.stderr
    assert "nats-server -js" in done.stderr


def test_a_taken_port(folder):
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, errors = slipstream("up", write(folder), "--set", f"broker.port={port}")
    assert code == 3
    assert f"port {port} of 127.0.0.1 is taken: set broker.port" in errors


def test_a_model_that_cannot_be_built(folder):
    code, _, errors = slipstream("up", write(folder))
    assert code == 2
    assert "model.build: cli_task.build_model failed" in errors
    assert "AssertionError: validate must not build" in errors
    assert not [entry for entry in folder.iterdir() if "model" in entry.name]


def test_since_takes_ages_and_times(folder):
    code, _, errors = slipstream("events", write(folder), "--since", "yesterday")
    assert code == 2
    assert "90s, 10m, 2h, 1d" in errors


def test_audit_and_status_of_a_run_that_is_stopped(folder):
    """The store is served for the time of the command; a run without a config is told apart from a sound one."""
    path = write(folder)
    with EmbeddedBroker(folder / "work" / "broker"):
        pass
    code, _, errors = slipstream("status", path)
    assert code == 2
    assert "cli-test" in errors
    assert json.loads((folder / "work/broker.json").read_text())["port"] > 0


async def test_a_command_that_is_ended_leaves_no_broker(folder):
    """`watch` serves the store of a stopped run; SIGTERM takes that broker along."""
    path = write(folder)
    config = load(path)
    (folder / "work/broker").mkdir(parents=True)
    async with serving(config) as url:
        async with attach(url, "cli-test", create=True) as run:
            await settle(run, config)
            await run.queue.ensure_streams(config)
    command = [sys.executable, "-m", "services.controller.cli", "watch", path]
    process = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parents[2])
    broker = PrivateBroker(folder / "work", BrokerConfig())
    await until(broker.found, "the command serves the store", 300)
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 300) == 130
    assert not broker.running
