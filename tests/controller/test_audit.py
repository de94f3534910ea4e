"""The audit finds what is planted, names it, and finds nothing in a sound run."""

from dataclasses import replace

import pytest

from services.controller.audit import audit
from shared.records import DeadLetter, Receipt

from . import evidence as runs


def faults(evidence) -> dict[str, list[str]]:
    """Offending subjects by check, of the checks that found something."""
    return {check.name: [fault.subject for fault in check.faults] for check in audit(evidence).checks if check.faults}


CONSERVATION = "issued = trained + dropped + pending"
FATE = "one fate a group"
UPDATES = "every update holds groups_per_step groups"
CONTENT = "every trained group has one trajectory"
STALENESS = "no trained token is older than 1 steps"
AGREE = "receipts agree with the trajectories"
VERSIONS = "versions only grow, each has one step and digest"
DIGESTS = "every verified digest is the trainer's"
REPEATS = "a step that is done again gives the same weights"
VERIFIED = "replicas serve only what they verified"
DEAD = "dead groups are kept as dead letters"


def test_a_sound_run_has_no_faults():
    result = audit(runs.sound())
    assert result.ok
    assert (result.issued, result.trained, result.dropped, result.pending) == (10, 8, {"zero_variance": 1}, 1)
    assert result.ages == {0: 4, 1: 12}
    assert all(check.looked_at for check in result.checks if check.name != DEAD)


def test_a_lost_issued_receipt():
    evidence = runs.sound()
    runs.without(evidence, "0-3", "issued")
    assert faults(evidence) == {CONSERVATION: ["0-3", "issue 3"]}


def test_a_lost_trained_receipt_leaves_its_update_short():
    evidence = runs.sound()
    runs.without(evidence, "0-3", "trained")
    assert faults(evidence) == {UPDATES: ["step 1"]}


def test_the_last_update_of_a_running_trainer_may_be_half_told():
    evidence = runs.sound()
    runs.without(evidence, "0-7", "trained")
    for state in ("running", "failed:the trainer died"):
        evidence.state = state
        assert audit(evidence).ok


def test_an_issue_number_given_twice():
    evidence = runs.sound()
    runs.changed(evidence, "0-9", "issued", issue=8)
    assert faults(evidence) == {CONSERVATION: ["0-9", "issue 9"]}


def test_discarded_receipts_are_a_fault():
    evidence = runs.sound()
    evidence.cut["receipts"] = 12
    assert faults(evidence) == {CONSERVATION: ["receipts"]}


def test_a_group_trained_twice():
    evidence = runs.sound()
    evidence.receipts.append(runs.trained("0-2", 2, 3, [0, 0]))
    found = faults(evidence)
    assert found[FATE] == ["0-2"]
    assert found[STALENESS] == ["0-2", "0-2"], "the second training was also too old, once a sample"


def test_trained_after_it_was_dropped():
    evidence = runs.sound()
    evidence.receipts.append(runs.trained("0-8", 8, 3, [2, 2]))
    assert faults(evidence)[FATE] == ["0-8"]


def test_a_rollback_reopens_groups_and_the_same_group_may_train_again():
    evidence = runs.sound()
    evidence.receipts.append(Receipt("rollback", step=2))
    evidence.receipts += [runs.trained(f"0-{issue}", issue, issue // 2, [issue // 2 - 1] * 2) for issue in range(4, 8)]
    assert audit(evidence).ok


def test_weights_of_an_undone_history_count_from_the_last_shared_step():
    """Update 3 is done again after a rollback to step 1, with samples that the undone step 2 drew."""
    evidence = runs.sound()
    evidence.receipts.append(Receipt("rollback", step=1, detail={"version": 6}))
    evidence.receipts += [
        runs.trained(f"0-{issue}", issue, issue // 2, [max(issue // 2 - 1, 0)] * 2) for issue in (2, 3)
    ]
    for issue in range(4, 8):
        evidence.receipts.append(runs.trained(f"0-{issue}", issue, issue // 2, [1, 1]))
    found = faults(evidence)
    assert found == {STALENESS: ["0-6", "0-6", "0-7", "0-7"]}, "step 2 of the old history is step 1 of this one"
    assert audit(evidence).ages[2] == 4


def test_a_receipt_told_again_changes_nothing():
    evidence = runs.sound()
    evidence.receipts += list(evidence.receipts)
    assert audit(evidence).ok


def test_a_stale_token_is_found_even_if_the_receipt_hides_it():
    evidence = runs.sound()
    index = next(i for i, drawn in enumerate(evidence.drawn) if drawn.group_id == "0-6")
    evidence.drawn[index] = replace(evidence.drawn[index], span_version=(1, 3), span_step=(0, 2))
    assert faults(evidence) == {STALENESS: ["0-6"], AGREE: ["0-6"]}


def test_the_announcements_decide_how_old_a_version_is():
    evidence = runs.sound()
    evidence.announced[2] = replace(evidence.announced[2], step=1)
    found = faults(evidence)
    assert found[STALENESS] == ["0-6", "0-6", "0-7", "0-7"]
    assert found[AGREE] == found[VERSIONS] == ["0-6", "0-7"]


def test_a_trained_receipt_without_sample_steps():
    evidence = runs.sound()
    runs.changed(evidence, "0-5", "trained", sample_steps=None)
    assert faults(evidence) == {AGREE: ["0-5"]}


def test_two_trajectories_with_one_id():
    evidence = runs.sound()
    evidence.drawn.append(runs.drawn("0-4", 2, ids=8))
    assert faults(evidence) == {CONTENT: ["0-4"]}


def test_the_same_trajectory_written_twice_is_harmless():
    evidence = runs.sound()
    evidence.drawn.append(evidence.drawn[4])
    assert audit(evidence).ok


def test_trained_without_a_trajectory():
    evidence = runs.sound()
    evidence.drawn = [drawn for drawn in evidence.drawn if drawn.group_id != "0-1"]
    assert faults(evidence) == {CONTENT: ["0-1"]}
    evidence.cut["trajectories"] = 1
    assert audit(evidence).ok, "what the log's limit discarded cannot be held against the run"


def test_a_version_number_reused_or_going_back():
    evidence = runs.sound()
    evidence.announced.append(replace(evidence.announced[2], digest="other"))
    assert faults(evidence)[VERSIONS] == ["v3"]
    evidence = runs.sound()
    evidence.announced[1], evidence.announced[2] = evidence.announced[2], evidence.announced[1]
    assert faults(evidence) == {VERSIONS: ["v2"]}


def test_a_version_announced_again_with_the_same_content_is_harmless():
    evidence = runs.sound()
    evidence.announced.append(evidence.announced[1])
    assert audit(evidence).ok


def test_a_wrong_digest():
    evidence = runs.sound()
    evidence.received.append(runs.received(2, "rollout-0", digest="f" * 64))
    assert faults(evidence) == {DIGESTS: ["v2"]}


def test_a_deterministic_run_must_repeat_itself():
    """After a rollback that says so, weights of the lost history count as what they are, and are held against the new ones."""
    evidence = runs.sound()
    assert evidence.config is not None
    evidence.config.deterministic = True
    evidence.receipts.append(Receipt("rollback", step=1, detail={"version": 6, "repeats": True}))
    evidence.receipts += [runs.trained(f"0-{issue}", issue, issue // 2, [issue // 2 - 1] * 2) for issue in range(2, 8)]
    evidence.announced += [replace(old, version=old.version + 5) for old in evidence.announced[1:]]
    assert audit(evidence).ok
    evidence.announced[-1] = replace(evidence.announced[-1], digest="other")
    assert faults(evidence) == {REPEATS: [f"v{evidence.announced[-1].version}"]}


def test_what_a_replaced_trainer_wrote_late_is_no_training():
    evidence = runs.sound()
    evidence.receipts.append(Receipt("rollback", step=4, detail={"epoch": 2}))
    late = runs.trained("0-8", 8, 4, [0, 0])
    evidence.receipts.append(replace(late, detail={"epoch": 1}))
    assert audit(evidence).ok
    assert audit(evidence).trained == 8


def test_a_version_that_nobody_announced():
    evidence = runs.sound()
    evidence.received.append(runs.received(77))
    assert faults(evidence) == {DIGESTS: ["v77"]}


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_tokens_of_a_version_that_the_replica_never_verified(kind):
    evidence = runs.sound()
    evidence.received.append(runs.received(4, "rollout-2", ok=False))
    evidence.drawn.append(runs.drawn("eval-3-0", 4, replica="rollout-2", kind=kind))
    assert faults(evidence) == {VERIFIED: ["eval-3-0"]}
    evidence.received.append(runs.received(4, "rollout-2"))
    assert audit(evidence).ok


def test_a_group_that_two_replicas_drew_is_held_against_both():
    evidence = runs.sound()
    index = next(i for i, drawn in enumerate(evidence.drawn) if drawn.group_id == "0-6")
    evidence.drawn[index] = replace(evidence.drawn[index], replicas=("rollout-0", "rollout-1"))
    assert audit(evidence).ok
    evidence.drawn[index] = replace(evidence.drawn[index], replicas=("rollout-0", "rollout-7"))
    assert faults(evidence) == {VERIFIED: ["0-6"]}


def test_a_dead_group_must_be_kept():
    evidence = runs.sound()
    evidence.receipts.append(Receipt("dropped", "0-9", 9, 8, reason="dead:rewards"))
    assert faults(evidence) == {DEAD: ["0-9"]}
    evidence.dead.append(DeadLetter("rewards", "0-9", "six deliveries", b"", 6, 1.0))
    assert audit(evidence).ok


def test_an_empty_run_is_no_fault():
    evidence = runs.sound()
    evidence.receipts, evidence.drawn, evidence.announced, evidence.received = [], [], [], []
    assert audit(evidence).ok
