"""A small run's evidence, sound until a test plants a fault in it."""

from __future__ import annotations

from dataclasses import replace

from services.controller.evidence import Drawn, Evidence
from shared import config
from shared.records import Announcement, Group, Metric, Receipt, Received, Samples, Sampling, ints

STEPS, GROUPS, SAMPLES, BOUND = 4, 2, 2, 1


def group(name: str, version: int, *, ids: int = 7, replica: str = "rollout-0", kind: str = "train") -> Group:
    """Two samples of three tokens each, all drawn under `version`, which holds the weights of step `version - 1`."""
    columns = {"ids": ints([ids] * 6), "logprobs": ints([0] * 6).astype("<f4"), "mask": ints([1] * 6).astype("|u1")}
    spans = {"span_sample": ints([0, 1]), "span_start": ints([0, 0]), "span_end": ints([3, 3])}
    versions = {"span_version": ints([version] * 2), "span_step": ints([version - 1] * 2)}
    samples = Samples(lengths=ints([3, 3]), finish=["stop"] * 2, texts=["abc"] * 2, **columns, **spans, **versions)
    return Group(name, kind, 0, 0, 0, "p", "a", {}, Sampling(SAMPLES, 4), samples=samples, replica=replica)


def drawn(name: str, version: int, **options) -> Drawn:
    entry = Drawn.of(group(name, version, **options))
    assert entry is not None
    return entry


def announcement(version: int, step: int) -> Announcement:
    return Announcement(version, step, ["w"], ["F32"], [[1]], ["s"], f"digest-{version}", None, [[0]], "", "step", 10.0)


def received(version: int, replica: str = "rollout-0", *, digest: str = "", ok: bool = True) -> Received:
    seconds = {"receive": 0.5, "switch": 0.01}
    return Received(replica, version, version - 1, digest or f"digest-{version}", "broadcast", seconds, ok, "", 11.0)


def sound() -> Evidence:
    """Four updates of two groups; the weights after k updates are version k + 1, and update k trains on those of step k - 1."""
    evidence = Evidence(state="finished")
    evidence.config = config.parse(
        {
            "run": "demo",
            "steps": STEPS,
            "groups_per_step": GROUPS,
            "samples_per_group": SAMPLES,
            "max_staleness": BOUND,
            "model": {"path": "model"},
            "prompts": {"source": "prompts.jsonl"},
            "reward": {"functions": [{"path": "task.reward"}]},
        },
        "the test",
    )
    evidence.config_bytes = evidence.config.dump()
    for step in range(STEPS + 1):
        evidence.announced.append(announcement(step + 1, step))
        evidence.received += [received(step + 1, "rollout-0"), received(step + 1, "rollout-1")]
    for issue in range(STEPS * GROUPS):
        name, step = f"0-{issue}", issue // GROUPS
        version = max(step, 1)
        evidence.receipts.append(Receipt("issued", name, issue=issue, seat=issue, at=100.0 + issue))
        evidence.drawn.append(drawn(name, version, replica=f"rollout-{issue % 2}"))
        evidence.receipts.append(trained(name, issue, step, [version - 1] * SAMPLES))
    evidence.receipts.append(Receipt("issued", "0-8", issue=8, seat=8, at=109.0))
    evidence.receipts.append(Receipt("dropped", "0-8", issue=8, seat=8, reason="zero_variance", at=109.5))
    evidence.receipts.append(Receipt("issued", "0-9", issue=9, seat=8, at=110.0))
    return evidence


def trained(name: str, issue: int, step: int, steps: list[int]) -> Receipt:
    reward = (issue + 1) / 10
    return Receipt(
        "trained", name, issue, issue, step=step, sample_steps=ints(steps), tokens=6, reward=reward, at=100.5 + issue
    )


def metric(service: str, values: dict[str, float], replica: str = "a", at: float = 105.0) -> Metric:
    return Metric(service, replica, None, values, at)


def changed(evidence: Evidence, name: str, kind: str, **fields) -> None:
    """Replace fields of the one receipt of `kind` that group `name` has."""
    for index, receipt in enumerate(evidence.receipts):
        if receipt.group_id == name and receipt.kind == kind:
            evidence.receipts[index] = replace(receipt, **fields)
            return
    raise AssertionError(f"no {kind} receipt of {name}")


def without(evidence: Evidence, name: str, kind: str) -> None:
    """Lose the one receipt of `kind` that group `name` has."""
    kept = [receipt for receipt in evidence.receipts if (receipt.group_id, receipt.kind) != (name, kind)]
    assert len(kept) == len(evidence.receipts) - 1
    evidence.receipts = kept
