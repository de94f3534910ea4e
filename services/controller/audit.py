"""Proof from the streams alone: `issued = trained + dropped(by reason) + pending`, one fate a group, and the staleness bound.

The core is pure: `audit(evidence)` looks at records and answers with one `Check` a claim. It trusts no receipt where it can
count again: a sample's age is recomputed from its spans in the trajectories log and the steps that the announcements told.
`tests/controller/test_audit.py` plants each fault (a lost receipt, a group trained twice, a stale token, a wrong digest, an
unverified version) and sees it found. The command `slipstream audit` prints the table and exits non-zero if anything was found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shared.ledger import Ledger
from shared.records import Announcement, Receipt

from .evidence import Evidence


@dataclass(slots=True, frozen=True)
class Fault:
    """One thing that must not be. `subject` is a group id, or `v<version>`, or `step <k>`."""

    subject: str
    message: str


@dataclass(slots=True)
class Check:
    """One claim, how many things it was held against, and what contradicts it."""

    name: str
    looked_at: int
    faults: list[Fault]
    note: str = ""


@dataclass(slots=True)
class Audit:
    """The result: conservation's numbers, the checks, and how old the trained samples were."""

    issued: int
    trained: int
    dropped: dict[str, int]
    pending: int
    checks: list[Check]
    ages: dict[int, int] = field(default_factory=dict)
    """Trained samples by age in steps."""

    @property
    def ok(self) -> bool:
        return not any(check.faults for check in self.checks)


def audit(evidence: Evidence) -> Audit:
    """Hold every claim against the evidence."""
    ledger = evidence.ledger()
    return Audit(
        issued=ledger.issued,
        trained=ledger.trained,
        dropped=dict(ledger.dropped),
        pending=ledger.pending,
        checks=[
            _conservation(evidence, ledger),
            _one_fate(ledger),
            _full_updates(evidence, ledger),
            _one_content(evidence, ledger),
            _staleness(evidence),
            _receipts_agree(evidence),
            _versions(evidence),
            _digests(evidence),
            *([_repeats(evidence)] if evidence.config is not None and evidence.config.deterministic else []),
            _verified(evidence),
            _dead_letters(evidence),
        ],
        ages=trained_ages(evidence, ledger),
    )


def trained_ages(evidence: Evidence, ledger: Ledger) -> dict[int, int]:
    """Samples by age, over the groups that the final weights were trained on."""
    ages: Counter[int] = Counter()
    for training in evidence.final_trainings(ledger):
        ages.update(training.receipt.step - oldest for oldest in training.oldest if oldest >= 0)
    return dict(sorted(ages.items()))


def _conservation(evidence: Evidence, ledger: Ledger) -> Check:
    """Every fate belongs to an issued group, every issue number was given once, and the log is whole."""
    faults = [
        Fault(entry.group_id, f"{entry.fate}, but the log holds no `issued` receipt of it")
        for entry in ledger.entries.values()
        if not entry.issued
    ]
    holders: dict[int, str] = {}
    for entry in ledger.entries.values():
        if entry.issued and (other := holders.setdefault(entry.issue, entry.group_id)) != entry.group_id:
            faults.append(Fault(entry.group_id, f"issue number {entry.issue} was given to {other} as well"))
    missing = sorted(set(range(ledger.issued)) - set(holders))
    faults += [Fault(f"issue {issue}", "no group has this issue number") for issue in missing]
    if lost := evidence.cut.get("receipts", 0):
        faults.append(Fault("receipts", f"the first {lost} receipts were discarded by the stream's limit"))
    if evidence.unfit:
        faults.append(Fault("streams", f"{evidence.unfit} messages were ignored: their writers had no right to them"))
    if not faults and not ledger.balanced and not ledger.conflicts:
        faults.append(Fault("ledger", "issued differs from trained + dropped + pending"))
    return Check("issued = trained + dropped + pending", ledger.issued, faults)


def _one_fate(ledger: Ledger) -> Check:
    faults = []
    for receipt in ledger.conflicts:
        entry = ledger.entries[receipt.group_id]
        first = f"trained in update {entry.step}" if entry.fate == "trained" else f"dropped ({entry.reason})"
        second = f"trained in update {receipt.step}" if receipt.kind == "trained" else f"dropped ({receipt.reason})"
        faults.append(Fault(receipt.group_id, f"{first}, and then {second}"))
    return Check("one fate a group", len(ledger.entries), faults)


def _full_updates(evidence: Evidence, ledger: Ledger) -> Check:
    """Updates are numbered without a gap and each holds groups_per_step groups: a lost receipt shows up here."""
    name = "every update holds groups_per_step groups"
    if evidence.config is None:
        return Check(name, 0, [], "no config in the run's bucket")
    size, last = evidence.config.groups_per_step, max(ledger.by_step, default=-1)
    faults = []
    for step in range(last + 1):
        count = len(ledger.by_step.get(step, []))
        unfinished = step == last and evidence.state != "finished" and count < size
        if count != size and not unfinished:
            faults.append(Fault(f"step {step}", f"{count} trained groups in this update, expected {size}"))
    return Check(name, last + 1, faults)


def _one_content(evidence: Evidence, ledger: Ledger) -> Check:
    """What was trained on is in the trajectories log, once."""
    drawn_by_id, faults, checked = evidence.drawn_by_id(), [], 0
    lost = evidence.cut.get("trajectories", 0)
    for entry in ledger.entries.values():
        if entry.fate != "trained":
            continue
        contents = {drawn.content for drawn in drawn_by_id.get(entry.group_id, [])}
        checked += bool(contents)
        if len(contents) > 1:
            faults.append(Fault(entry.group_id, f"{len(contents)} different trajectories have this id"))
        elif not contents and not lost:
            faults.append(Fault(entry.group_id, "trained, but the trajectories log does not hold it"))
    note = f"the log's limit discarded its first {lost} messages; those groups cannot be checked" if lost else ""
    return Check("every trained group has one trajectory", checked, faults, note)


def _staleness(evidence: Evidence) -> Check:
    """Per sample: update - step of the oldest weights that drew a token of it <= max_staleness."""
    if evidence.config is None:
        return Check("staleness bound", 0, [], "no config in the run's bucket")
    bound, faults, checked = evidence.config.max_staleness, [], 0
    for training in evidence.trainings():
        update = training.receipt.step
        for sample, oldest in enumerate(training.oldest):
            if oldest < 0:
                continue
            checked += 1
            if update - oldest > bound:
                text = f"sample {sample} has a token of step {oldest}, trained in update {update}: "
                text += f"age {update - oldest}, bound {bound}"
                faults.append(Fault(training.receipt.group_id, text))
    return Check(f"no trained token is older than {bound} steps", checked, faults)


def _receipts_agree(evidence: Evidence) -> Check:
    """The trainer's receipts say of each sample what the trajectories and announcements say."""
    faults, checked = [], 0
    for training in evidence.trainings():
        receipt, counted = training.receipt, training.oldest
        if receipt.sample_steps is None:
            faults.append(Fault(receipt.group_id, "its trained receipt names no sample steps"))
            continue
        checked += 1
        told = receipt.sample_steps.tolist()
        if len(told) != len(counted) or any(one != two for one, two in zip(told, counted, strict=True) if two >= 0):
            faults.append(Fault(receipt.group_id, f"the receipt says steps {told}, its spans say {counted}"))
    return Check("receipts agree with the trajectories", checked, faults)


def _versions(evidence: Evidence) -> Check:
    """Version numbers grow and are never reused; the same version told again must say the same."""
    faults: list[Fault] = []
    known: dict[int, tuple[int, str]] = {}
    newest = -1
    for announcement in evidence.announced:
        version, said = announcement.version, (announcement.step, announcement.digest)
        if version in known:
            if known[version] != said:
                faults.append(Fault(f"v{version}", "announced twice with different steps or digests"))
        elif version < newest:
            faults.append(Fault(f"v{version}", f"announced after v{newest}"))
        known.setdefault(version, said)
        newest = max(newest, version)
    step_of = evidence.step_of()
    for drawn in evidence.drawn:
        for version, step in set(zip(drawn.span_version, drawn.span_step, strict=True)):
            if version in step_of and step_of[version] != step:
                text = f"its spans place v{version} at step {step}, the announcement at {step_of[version]}"
                faults.append(Fault(drawn.group_id, text))
    return Check("versions only grow, each has one step and digest", len(evidence.announced), faults)


def _digests(evidence: Evidence) -> Check:
    """Whoever says `ok` holds the bytes that the trainer announced."""
    announced = {announcement.version: announcement for announcement in evidence.announced}
    lost, faults, checked = evidence.cut.get("weights", 0), [], 0
    for received in evidence.received:
        if not received.ok:
            continue
        if (announcement := announced.get(received.version)) is None:
            if not lost:
                faults.append(Fault(f"v{received.version}", f"verified by {received.replica}, but never announced"))
            continue
        checked += 1
        if received.digest != announcement.digest:
            text = f"{received.replica} holds {received.digest[:12]}, announced was {announcement.digest[:12]}"
            faults.append(Fault(f"v{received.version}", text))
    return Check("every verified digest is the trainer's", checked, faults)


def _repeats(evidence: Evidence) -> Check:
    """A deterministic run reaches the same weights whenever it comes to a step again. Its staleness rests on that."""
    first: dict[int, Announcement] = {}
    faults = []
    for announcement in evidence.announced:
        known = first.setdefault(announcement.step, announcement)
        if known.digest != announcement.digest:
            text = f"step {announcement.step} has the digest {announcement.digest[:12]}, but v{known.version} of the same step "
            faults.append(Fault(f"v{announcement.version}", f"{text}had {known.digest[:12]}"))
    return Check("a step that is done again gives the same weights", len(evidence.announced), faults)


def _verified(evidence: Evidence) -> Check:
    """No token was drawn under a version that its replica had not verified."""
    verified = {(received.replica, received.version) for received in evidence.received if received.ok}
    lost, faults, checked = evidence.cut.get("weights", 0), [], 0
    for drawn in evidence.drawn:
        for replica, version in sorted(drawn.drawn_by()):
            checked += 1
            if (replica, version) not in verified and not lost:
                text = f"{replica or 'its replica'} drew tokens under v{version} without having verified it"
                faults.append(Fault(drawn.group_id, text))
    note = f"the log's limit discarded {lost} messages about weights; not checked" if lost else ""
    return Check("replicas serve only what they verified", checked, faults, note)


def _dead_letters(evidence: Evidence) -> Check:
    """A group dropped as `dead:<stage>` lies in the dead letters, whole."""
    kept = {(letter.stage, letter.group_id) for letter in evidence.dead}
    faults, checked = [], 0
    for receipt in _dropped(evidence.receipts, "dead:"):
        checked += 1
        stage = receipt.reason.removeprefix("dead:")
        if (stage, receipt.group_id) not in kept and not evidence.cut.get("dead"):
            faults.append(Fault(receipt.group_id, f"dropped as {receipt.reason}, but no dead letter holds it"))
    return Check("dead groups are kept as dead letters", checked, faults)


def _dropped(receipts: Iterable[Receipt], prefix: str) -> Iterator[Receipt]:
    return (receipt for receipt in receipts if receipt.kind == "dropped" and receipt.reason.startswith(prefix))
