"""The wire format: what goes in comes out; what is malformed is refused whole, with its reason."""

import itertools

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import wire
from shared.records import Group, Receipt, Rewards, Samples, Sampling, floats, ints
from shared.wire import WireError

texts = st.text(max_size=20)
finite = st.floats(-1e6, 1e6, width=32)


@st.composite
def groups(draw):
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    total = sum(lengths)
    spans = []
    for sample, length in enumerate(lengths):
        cuts = sorted(draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=2)) & set(range(1, length)))
        edges = [0, *cuts, length] if length else []
        for start, end in itertools.pairwise(edges):
            spans.append((sample, start, end, draw(st.integers(1, 9)), draw(st.integers(0, 9))))
    columns = np.asarray(spans, dtype="<i4").reshape(-1, 5)
    samples = Samples(
        lengths=ints(lengths),
        ids=ints(draw(st.lists(st.integers(0, 2**31 - 1), min_size=total, max_size=total))),
        logprobs=floats(draw(st.lists(finite, min_size=total, max_size=total))),
        mask=np.asarray(draw(st.lists(st.integers(0, 1), min_size=total, max_size=total)), dtype="|u1"),
        finish=draw(st.lists(st.sampled_from(["stop", "length"]), min_size=len(lengths), max_size=len(lengths))),
        texts=draw(st.lists(texts, min_size=len(lengths), max_size=len(lengths))),
        span_sample=columns[:, 0].copy(),
        span_start=columns[:, 1].copy(),
        span_end=columns[:, 2].copy(),
        span_version=columns[:, 3].copy(),
        span_step=columns[:, 4].copy(),
    )
    scores = floats(draw(st.lists(finite, min_size=len(lengths), max_size=len(lengths))))
    return Group(
        id=draw(texts),
        kind="train",
        issue=draw(st.integers(0, 10**9)),
        seat=draw(st.integers(0, 10**9)),
        min_step=draw(st.integers(0, 10**6)),
        prompt=draw(st.one_of(texts, st.lists(st.fixed_dictionaries({"role": texts, "content": texts}), max_size=3))),
        answer=draw(st.one_of(st.none(), texts, st.integers(-9, 9), st.lists(texts, max_size=3))),
        meta={"source": draw(texts)},
        sampling=Sampling(n=len(lengths), max_new_tokens=6, seed=draw(st.one_of(st.none(), st.integers(0, 9)))),
        prompt_ids=ints(draw(st.lists(st.integers(0, 99), max_size=5))),
        samples=samples,
        rewards=Rewards(scores, {"r": scores}, [""] * len(lengths)),
        advantages=draw(st.sampled_from([None, scores])),
        columns=draw(st.sampled_from([{}, {"reference_logprobs": samples.logprobs}])),
        id_columns=draw(st.sampled_from([{}, {"teacher_top_ids": np.stack([samples.ids, samples.ids], axis=1)}])),
    )


def same(a, b):
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=True)
    if hasattr(a, "__dataclass_fields__"):
        return all(same(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


@given(groups())
def test_a_group_comes_back_as_it_was_sent(group):
    assert same(wire.decode(wire.encode(group), Group), group)


@given(groups())
def test_oldest_step_is_the_smallest_of_a_samples_spans(group):
    samples = group.samples
    for number, (length, oldest) in enumerate(zip(samples.lengths, samples.oldest_steps(), strict=True)):
        steps = samples.span_step[samples.span_sample == number]
        assert oldest == (steps.min() if length else -1)


@given(groups(), st.data())
def test_a_cut_message_is_refused(group, data):
    payload = wire.encode(group)
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(WireError):
        wire.decode(payload[:cut], Group)


@given(st.binary(max_size=200))
def test_noise_is_refused_and_never_crashes(payload):
    with pytest.raises(WireError):
        wire.decode(payload, Group)


def envelope(**changes):
    message = wire.encode(Receipt("issued", "0-0", issue=0, seat=0))
    body = msgpack.unpackb(message[wire.PREFIX :], raw=False)
    body["body"].update(changes)
    return body


def message(head, columns=b""):
    """Around any envelope, well-formed or not."""
    packed = msgpack.packb(head)
    gap = bytes(-(wire.PREFIX + len(packed)) % wire.ALIGN) if columns else b""
    return wire.MAGIC + len(packed).to_bytes(4, "little") + packed + gap + columns


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ({"schema": "receipt"}, "exactly the keys"),
        ({"schema": "no-such", "version": 1, "body": {}}, "unknown schema 'no-such'"),
        ({**envelope(), "version": 99}, "version 99: this side speaks 1"),
        (envelope(kind="lost"), r"receipt.kind: got str, expected"),
        (envelope(issue="3"), "receipt.issue: got str, expected int"),
        (envelope(issue=True), "receipt.issue: got bool, expected int"),
        (envelope(surprise=1), "unknown surprise"),
        ({**envelope(), "body": {"kind": "issued"}}, "missing at, detail"),
        ([1, 2], "not an envelope"),
    ],
)
def test_a_malformed_message_says_what_is_wrong(head, reason):
    with pytest.raises(WireError, match=reason):
        wire.decode(message(head), Receipt)


def test_what_is_no_message_or_too_long_is_refused():
    whole = wire.encode(Receipt("issued"))
    with pytest.raises(WireError, match="not a message of this system, or a cut one: 4 bytes"):
        wire.decode(b"{}\r\n", Receipt)
    with pytest.raises(WireError, match="not msgpack"):
        wire.decode(wire.MAGIC + b"\1\0\0\0\xc1", Receipt)
    with pytest.raises(WireError, match=f"{len(whole) + 1} bytes, of which envelope and columns fill {len(whole)}"):
        wire.decode(whole + b"\0", Receipt)


@pytest.mark.parametrize(
    ("array", "columns", "reason"),
    [
        (["<i4", [3]], b"\0" * 8, "with 8 bytes"),
        (["<i4", [2]], b"\0" * 12, "bytes, of which"),
        (["<i4", [-1]], b"", "shape"),
        (["|O8", [1]], b"\0" * 8, "array of '|O8'"),
        (["<f4", [1]], b"\0" * 4, "<f4 array, expected"),
    ],
)
def test_a_malformed_array_is_refused(array, columns, reason):
    extension = msgpack.ExtType(wire.ARRAY_EXT, msgpack.packb(array))
    with pytest.raises(WireError, match=reason.replace("|", r"\|")):
        wire.decode(message(envelope(sample_steps=extension), columns), Receipt)


def test_the_wrong_record_is_refused():
    with pytest.raises(WireError, match="expected a Group, got a Receipt"):
        wire.decode(wire.encode(Receipt("issued")), Group)


def test_what_cannot_travel_is_refused_at_the_sender():
    with pytest.raises(WireError, match="Receipt.step: cannot send str"):
        wire.encode(Receipt("trained", step="3"))
    with pytest.raises(WireError, match="cannot send a set"):
        wire.encode(Receipt("trained", detail={"a": {1}}))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("ids", ints([1]), "ids: shape"),
        ("finish", ["stop"], "finish: 1 entries for 2 samples"),
        ("span_end", ints([2, 2]), "spans"),
        ("span_start", ints([1, 0]), "spans must follow"),
        ("lengths", ints([2, 2]), "lengths sum to 4"),
    ],
)
def test_columns_that_do_not_fit_are_refused(field, value, reason):
    columns = {
        "lengths": ints([2, 1]),
        "ids": ints([5, 6, 7]),
        "logprobs": floats([0, 0, 0]),
        "mask": np.ones(3, "|u1"),
        "finish": ["stop", "stop"],
        "texts": ["", ""],
        "span_sample": ints([0, 1]),
        "span_start": ints([0, 0]),
        "span_end": ints([2, 1]),
        "span_version": ints([1, 1]),
        "span_step": ints([0, 0]),
    }
    assert Samples(**columns)
    with pytest.raises(ValueError, match=reason):
        Samples(**{**columns, field: value})


@pytest.mark.parametrize(
    "inner",
    [5, None, "<i4", [["x"], [1]], ["<i4", [1]], ["<i4"], ["<i4", [-1]], ["<i4", 5], [{}, []], ["<i4", [1], b""]],
)
def test_refuses_an_array_that_is_none(inner):
    column = msgpack.ExtType(wire.ARRAY_EXT, msgpack.packb(inner))
    with pytest.raises(WireError, match="array|envelope|unpack"):
        wire.decode_any(message({"schema": "receipt", "version": 1, "body": {"sample_steps": column}}))
