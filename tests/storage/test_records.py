from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from ckn_scale.errors import CorruptData
from ckn_scale.storage.records import RecordLog, decode_record, encode_record, new_attempt


@dataclass(frozen=True)
class Note:
    number: int
    text: str

    @classmethod
    def from_body(cls, number, body):
        return cls(number, body["text"])

    def to_body(self):
        return {"text": self.text}


@pytest.fixture
def log(store) -> RecordLog[Note]:
    return RecordLog(store, "plan", Note)


def test_new_attempt_is_unique_hex():
    attempts = {new_attempt() for _ in range(100)}
    assert len(attempts) == 100
    assert all(int(attempt, 16) >= 0 for attempt in attempts)


def test_encode_record_does_not_depend_on_key_order():
    assert encode_record({"a": 1, "b": "ü"}) == encode_record({"b": "ü", "a": 1})


def test_decode_record_gives_the_body_back():
    body = {"attempt": "ab", "files": {"x": [1, 2.5, None]}, "name": "ü"}
    assert decode_record(encode_record(body), "here") == body


@pytest.mark.parametrize("cut", [0, 1, 10, -1])
def test_decode_record_refuses_a_torn_record(cut):
    with pytest.raises(CorruptData, match="here"):
        decode_record(encode_record({"attempt": "ab", "rows": 12})[:cut], "here")


def test_decode_record_notices_every_flipped_bit():
    data = encode_record({"attempt": "ab", "rows": 12})
    noticed = 0
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            body = decode_record(bytes(flipped), "here")
        except CorruptData:
            noticed += 1
            continue
        # White space between the tokens carries nothing.
        assert body == {"attempt": "ab", "rows": 12}
    assert noticed > 0.95 * 8 * len(data)


@pytest.mark.parametrize("data", [b"[]", b"3", b"null", b"{}", b'{"checksum": "x"}', b"\xff\xfe"])
def test_decode_record_refuses_what_is_no_record(data):
    with pytest.raises(CorruptData):
        decode_record(data, "here")


def test_encode_record_refuses_nan():
    with pytest.raises(ValueError, match="JSON"):
        encode_record({"loss": float("nan")})


def test_empty_log_has_no_records(log):
    assert log.latest() is None
    assert log.all() == []


def test_create_is_won_once(log):
    first = log.create(Note(1, "a"))
    second = log.create(Note(1, "b"))
    assert (first.won, second.won) == (True, False)
    assert first.record == second.record == Note(1, "a")


def test_create_again_with_the_same_attempt_is_still_won(log):
    attempt = new_attempt()
    assert log.create(Note(1, "a"), attempt=attempt).won
    assert log.create(Note(1, "a"), attempt=attempt).won
    assert not log.create(Note(1, "a")).won


def test_create_refuses_number_zero(log):
    with pytest.raises(ValueError, match="start at 1, got 0"):
        log.create(Note(0, "a"))


def test_append_counts_up_and_latest_is_the_highest(log, store):
    assert [log.append(Note(0, text)) for text in "abc"] == [1, 2, 3]
    assert log.latest() == Note(3, "c")
    assert log.all() == [Note(1, "a"), Note(2, "b"), Note(3, "c")]
    assert store.list("plan") == ["plan/000001.json", "plan/000002.json", "plan/000003.json"]


def test_append_in_a_race_loses_none(log):
    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(lambda text: log.append(Note(0, text)), "abcd"))
    assert sorted(numbers) == [1, 2, 3, 4]
    assert sorted(note.text for note in log.all()) == list("abcd")


def test_damaged_record_is_passed_over_with_a_word_and_keeps_its_number(log, damage, store, caplog):
    log.append(Note(0, "a"))
    log.append(Note(0, "b"))
    assert log.read_all()[1] == {}
    damage("plan/000002.json", store.read("plan/000002.json")[:20])
    for _ in range(2):
        assert log.latest() == Note(1, "a")
    (told,) = caplog.messages
    assert f"{store.url}/plan/000002.json is not a whole record" in told, "once, though it was met twice"
    assert "plan/000001.json is used instead" in told
    assert log.all() == [Note(1, "a")]
    assert list(log.read_all()[1]) == [2]
    with pytest.raises(CorruptData, match=r"plan/000002.json"):
        log.create(Note(2, "c"))
    assert log.append(Note(0, "c")) == 3
    assert log.latest() == Note(3, "c")


def test_record_of_another_kind_is_corrupt(log, store):
    store.write_new("plan/000001.json", encode_record({"attempt": "ab", "other": 1}))
    with pytest.raises(
        CorruptData, match=r"plan/000001\.json is not a record of its kind \(KeyError: 'text'\)"
    ):
        log.read(1)
    assert log.latest() is None


def test_other_files_beside_records_do_not_count(log, store):
    store.write_new("plan/ckn-0123.safetensors", b"x")
    store.write_new("plan/7.json", b"x")
    store.write_new("plan/000009.json.bak", b"x")
    store.write_new("plan/000008-ab/000009.json", b"x")
    assert log.numbers() == []
    assert log.append(Note(0, "a")) == 1
