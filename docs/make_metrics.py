"""Writes docs/metrics.md from shared/metric_names.py and shared/streams.py: it cannot drift (tests/shared/test_docs.py)."""

from pathlib import Path

from shared.metric_names import ANY, DECLARED, Declared
from shared.streams import SPECS
from shared.subjects import STREAMS, Subjects

PAGE = Path(__file__).with_name("metrics.md")

INTRODUCTION = """\
# Metrics, events, and where to send them

Every service publishes what it does; nobody is asked for it. Whoever wants to know subscribes, with any NATS client or with one
of the sinks below. This page is written by `docs/make_metrics.py`.

## Sinks

A sink is a process of its own that reads the run's streams. It acknowledges nothing and nobody waits for it, so that one that is
slow, hangs or dies cannot slow a run: it only falls behind. Each remembers how far it came and goes on from there; started late,
it begins with what the streams still hold. All of them end by themselves when the run is over and everything is handed on.

| command | what it does | needs |
| --- | --- | --- |
| `slipstream sink jsonl --out metrics.jsonl` | one JSON object a line | - |
| `slipstream sink prometheus --port 9464` | serves `/metrics` | `slipstream-rl[prometheus]` |
| `slipstream sink tensorboard --out tb` | writes event files | `slipstream-rl[tensorboard]` |
| `slipstream sink wandb --project p [--offline]` | Weights & Biases | `slipstream-rl[wandb]` |
| `slipstream sink clearml --project p [--offline]` | ClearML | `slipstream-rl[clearml]` |
| `slipstream sink apprise --to URL` | notifications of events, over whatever Apprise knows | `slipstream-rl[apprise]` |

In this repository `pip install '.[tensorboard]'` and the like bring what a sink needs.

Say which run as with the other commands: `slipstream sink jsonl RUN.yaml --out metrics.jsonl` for a run that `slipstream up` has
(or had) here, `--nats URL --run NAME` from anywhere else.

Curves (TensorBoard, W&B, ClearML) are over the run's step. What a trainer or controller says of a step stands at that step; what
the others say in between (they know no step) is thinned to the newest value before each step. Names there are
`service/metric`, with `/replica` behind it where a service has several.

Prometheus names are `slipstream_<service>_<metric>` with the labels `run` and `replica`; a family `wait_s.*` becomes one
metric with the label `of`. Counters end in `_total`. Added by the sink: `slipstream_events_total{service,kind}`,
`slipstream_queue_messages{stream}` and `slipstream_queue_pending{stream}` (what to scale on: [scaling.md](scaling.md)),
`slipstream_replicas{service}`. A replica that has said nothing for five minutes is left out.
"""

SUBJECTS = """\
## Subjects

All start with the name of the run. Payloads are msgpack envelopes of `shared/records.py` (`shared.wire.decode` reads them; it
imports no torch). Metrics are published without waiting for an answer and may be lost; events are stored before they count.
"""

READS = {
    "prompts": "groups to sample",
    "partials": "finished samples of long groups that are not finished",
    "rewards": "groups to score",
    "trajectories": "every scored group",
    "teacher": "groups waiting for the teacher's log-probabilities",
    "reference": "groups waiting for the reference's",
    "advantages": "groups to train on",
    "receipts": "the ledger: issued, trained, dropped, rollback, evaluated",
    "weights": "`weights.announced` and `weights.received`: each version, and who verified it",
    "metrics": "`metrics.<service>.<replica>`: the numbers below",
    "events": "`events.<service>`: faults, restarts, joins, drops, scale operations",
    "dead": "`dead.<stage>`: what could not be processed, with the reason",
    "blobs": "payloads too large for a message of a queue",
    "archive": "payloads too large for a message of a log",
}

METRICS = """\
## Metrics

A `Metric` has `service`, `replica`, `step` (or none), `at` (seconds since the epoch) and `values` by name. A counter grows for as
long as its process lives and begins at 0 with the next one; a gauge is the value at that moment.
"""


def render() -> str:
    subjects = Subjects("RUN")
    lines = [INTRODUCTION, SUBJECTS, "| subject | kept | what |", "| --- | --- | --- |"]
    lines += [f"| `{subjects.wildcard(name)}` | {_kept(name)} | {READS[name]} |" for name in STREAMS]
    lines += ["", METRICS]
    groups = list(dict.fromkeys(one.services for one in DECLARED))
    services = [ANY, *dict.fromkeys(group for group in groups if group != ANY)]
    for group in dict.fromkeys(services):
        title = "Every service" if group == ANY else ", ".join(group)
        lines += [f"### {title}", "", "| metric | kind | unit | meaning |", "| --- | --- | --- | --- |"]
        lines += [_row(one) for one in DECLARED if one.services == group]
        lines.append("")
    return "\n".join(lines)


def _kept(name: str) -> str:
    spec = SPECS[name]
    if spec.retention == "workqueue":
        return "until acknowledged"
    return f"{spec.max_age_s // 86_400} days" if spec.max_age_s else "as a log"


def _row(one: Declared) -> str:
    meaning = one.help.replace("|", "\\|").replace("(docs/", "([docs/").replace(".md)", ".md](algorithms.md))")
    return f"| `{one.name}` | {one.kind} | {one.unit} | {meaning} |"


if __name__ == "__main__":
    PAGE.write_text(render())
