"""The ledger: conservation under any order of receipts, repeats and rollbacks included."""

from hypothesis import given
from hypothesis import strategies as st

from shared.ledger import Ledger
from shared.records import Receipt


def fold(receipts):
    ledger = Ledger()
    for receipt in receipts:
        ledger.apply(receipt)
    return ledger


@st.composite
def histories(draw):
    """What honest services write: issues in order, one fate each, rollbacks that undo the last updates, and repeats."""
    log, pending, trained, step = [], [], {}, 0
    issued = 0
    for action in draw(st.lists(st.sampled_from("iiitdr"), max_size=60)):
        if action == "i":
            log.append(Receipt("issued", f"0-{issued}", issue=issued, seat=len(pending) + len(trained)))
            pending.append(f"0-{issued}")
            issued += 1
        elif action == "t" and pending:
            group = pending.pop(draw(st.integers(0, len(pending) - 1)))
            trained[group] = step
            log.append(Receipt("trained", group, step=step))
            step += 1
        elif action == "d" and pending:
            group = pending.pop(0)
            log.append(Receipt("dropped", group, reason=draw(st.sampled_from(["stale", "zero_variance"]))))
        elif action == "r" and step:
            step = draw(st.integers(0, step - 1))
            log.append(Receipt("rollback", step=step))
            undone = [group for group, when in trained.items() if when >= step]
            pending.extend(undone)
            for group in undone:
                del trained[group]
    return log, issued, trained, pending


@given(histories())
def test_issued_is_trained_plus_dropped_plus_pending(history):
    log, issued, trained, pending = history
    ledger = fold(log)
    assert (ledger.issued, ledger.trained, ledger.pending) == (issued, len(trained), len(pending))
    assert ledger.issued == ledger.trained + ledger.dropped.total() + ledger.pending
    assert {e.group_id for e in ledger.pending_entries()} == set(pending)
    assert ledger.balanced


@given(histories(), st.data())
def test_a_receipt_that_is_delivered_twice_changes_nothing(history, data):
    log, *_ = history
    where = data.draw(st.integers(0, len(log)))
    once, twice = fold(log), fold(log[:where] + log[max(where - 1, 0) : where] + log[where:])
    assert (twice.issued, twice.trained, twice.dropped) == (once.issued, once.trained, once.dropped)
    assert twice.balanced


def test_a_second_fate_is_a_conflict_and_the_first_one_stands():
    ledger = fold(
        [
            Receipt("issued", "0-0", issue=0),
            Receipt("trained", "0-0", step=3),
            Receipt("dropped", "0-0", reason="stale"),
        ]
    )
    assert ledger.fate("0-0") == "trained"
    assert len(ledger.conflicts) == 1
    assert not ledger.balanced


def test_training_a_group_twice_is_a_conflict():
    ledger = fold(
        [Receipt("issued", "0-0", issue=0), Receipt("trained", "0-0", step=3), Receipt("trained", "0-0", step=4)]
    )
    assert not ledger.balanced


def test_a_fate_may_overtake_its_issue():
    ledger = fold([Receipt("dropped", "0-0", reason="dead:reward"), Receipt("issued", "0-0", issue=0)])
    assert ledger.balanced
    assert ledger.dropped == {"dead:reward": 1}


def test_a_fate_without_an_issue_does_not_balance():
    assert not fold([Receipt("trained", "0-0", step=0)]).balanced


def test_evaluations_have_no_fate():
    ledger = fold([Receipt("evaluated", "eval-0-0", reward=0.5)])
    assert ledger.balanced
    assert ledger.issued == 0


def test_a_dead_evaluation_message_that_nobody_could_read_unbalances_nothing():
    """Its kind is not known then, so it was dropped by its id alone."""
    ledger = fold([Receipt("issued", "0-0", issue=0), Receipt("dropped", "eval-0-3", reason="dead:reward")])
    assert ledger.balanced
    assert (ledger.issued, ledger.pending, ledger.dropped) == (1, 1, {})


def test_a_rollback_drops_what_is_lost_for_good():
    log = [Receipt("issued", f"0-{i}", issue=i) for i in range(3)]
    log += [Receipt("trained", f"0-{i}", step=i) for i in range(3)]
    log.append(Receipt("rollback", step=1, detail={"lost": ["0-1", "9-9"]}))
    ledger = fold(log)
    assert (ledger.trained, ledger.dropped, ledger.pending, ledger.balanced) == (1, {"rollback": 1}, 1, True)
    assert fold([*log, log[-1]]).dropped == {"rollback": 1}


def test_a_rolled_back_group_may_be_dropped():
    ledger = fold(
        [
            Receipt("issued", "0-0", issue=0),
            Receipt("trained", "0-0", step=5),
            Receipt("rollback", step=4),
            Receipt("dropped", "0-0", reason="stale"),
        ]
    )
    assert ledger.balanced
    assert ledger.dropped == {"stale": 1}
