from __future__ import annotations

import logging
import os
import pickle

from ckn_scale.storage.events import EventLog


def test_events_of_all_writers_are_read_oldest_first(store):
    first, second = EventLog(store, "events"), EventLog(store, "events")
    first.write("retry", shard_id=3, error=ValueError("x"))
    second.write("lost_worker", host="h2")
    first.write("retry", shard_id=4)
    first.flush()
    second.flush()
    events = EventLog(store, "events").read_all()
    assert [event["kind"] for event in events] == ["retry", "lost_worker", "retry"]
    assert events[0]["error"] == "x"
    assert events[1]["host"] == "h2"
    assert events[0]["pid"] == os.getpid()


def test_no_events(store):
    assert EventLog(store, "events").read_all() == []


def test_local_events_are_one_growing_file_per_writer(tmp_path_store):
    log = EventLog(tmp_path_store, "events")
    for shard_id in range(3):
        log.write("done", shard_id=shard_id)
    assert len(tmp_path_store.list("events")) == 1
    assert len(log.read_all()) == 3


def test_object_store_events_are_sent_together(s3):
    from ckn_scale.storage.store import Store

    store = Store(s3.url("events"))
    log = EventLog(store, "events")
    log.write("a")
    log.write("b")
    assert store.list("events") == []
    log.flush()
    log.flush()  # nothing waits
    assert len(store.list("events")) == 1


def test_torn_event_is_passed_over(tmp_path_store):
    log = EventLog(tmp_path_store, "events")
    log.write("a")
    path = tmp_path_store.local_path(tmp_path_store.list("events")[0])
    path.write_bytes(path.read_bytes() + b'{"at": 1.0, "ki')
    assert [event["kind"] for event in log.read_all()] == ["a"]


def test_events_that_cannot_be_written_cost_a_warning(tmp_path_store, caplog):
    tmp_path_store.write_new("events", b"a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        EventLog(tmp_path_store, "events").write("a")
    assert "1 events" in caplog.text


def test_copied_log_writes_its_own_file(tmp_path_store):
    log = EventLog(tmp_path_store, "events")
    copy = pickle.loads(pickle.dumps(log))
    log.write("a")
    copy.write("b")
    assert len(tmp_path_store.list("events")) == 2
