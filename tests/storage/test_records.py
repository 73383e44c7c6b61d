from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ckn_scale.errors import CorruptData
from ckn_scale.storage.records import RecordLog, decode_record, encode_record, new_attempt


@pytest.fixture
def log(store) -> RecordLog:
    return RecordLog(store, "plan")


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
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            body = decode_record(bytes(flipped), "here")
        except CorruptData:
            continue
        # White space between the tokens carries nothing.
        assert body == {"attempt": "ab", "rows": 12}


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
    first = log.create(1, {"who": "a"})
    second = log.create(1, {"who": "b"})
    assert (first.won, second.won) == (True, False)
    assert second.body == first.body
    assert first.body["who"] == "a"


def test_create_again_with_the_same_attempt_is_still_won(log):
    body = {"attempt": new_attempt(), "who": "a"}
    assert log.create(1, body).won
    assert log.create(1, body).won


def test_create_refuses_number_zero(log):
    with pytest.raises(ValueError, match="start at 1, got 0"):
        log.create(0, {})


def test_append_counts_up_and_latest_is_the_highest(log, store):
    assert [log.append({"n": i}) for i in range(3)] == [1, 2, 3]
    number, body = log.latest()
    assert (number, body["n"]) == (3, 2)
    assert [(number, body["n"]) for number, body in log.all()] == [(1, 0), (2, 1), (3, 2)]
    assert store.list("plan") == ["plan/000001.json", "plan/000002.json", "plan/000003.json"]


def test_append_in_a_race_loses_none(log):
    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(lambda i: log.append({"n": i}), range(4)))
    assert sorted(numbers) == [1, 2, 3, 4]
    assert sorted(body["n"] for _, body in log.all()) == [0, 1, 2, 3]


def test_damaged_record_is_passed_over_with_a_word_and_keeps_its_number(log, damage, store, caplog):
    log.append({"n": 1})
    log.append({"n": 2})
    assert log.read_all()[1] == {}
    damage("plan/000002.json", store.read("plan/000002.json")[:20])
    for _ in range(2):
        assert log.latest()[0] == 1
    (told,) = caplog.messages
    assert f"{store.url}/plan/000002.json is not a whole record" in told, "once, though it was met twice"
    assert "plan/000001.json is used instead" in told
    assert [number for number, _ in log.all()] == [1]
    assert list(log.read_all()[1]) == [2]
    with pytest.raises(CorruptData, match=r"plan/000002.json"):
        log.create(2, {"n": 3})
    assert log.append({"n": 3}) == 3
    assert log.latest()[1]["n"] == 3


def test_other_files_beside_records_do_not_count(log, store):
    store.write_new("plan/ckn-0123.safetensors", b"x")
    store.write_new("plan/7.json", b"x")
    store.write_new("plan/000009.json.bak", b"x")
    store.write_new("plan/000008-ab/000009.json", b"x")
    assert log.numbers() == []
    assert log.append({}) == 1
