"""A process that was killed or stopped is named by all others; one that has ended or was stopped itself is not."""

import threading
import time

import pytest

from dcvit.parallel import liveness


class Store:
    """Key-value store of a coordinator; `paused` makes it answer nothing until it is set again."""

    def __init__(self):
        self.values, self.running = {}, threading.Event()
        self.running.set()

    def key_value_set(self, key, value, allow_overwrite=False):
        self.running.wait()
        if key in self.values and not allow_overwrite:
            raise RuntimeError("ALREADY_EXISTS")
        self.values[key] = value

    def key_value_try_get(self, key):
        self.running.wait()
        if key not in self.values:
            raise RuntimeError("NOT_FOUND")
        return self.values[key]

    def key_value_dir_get(self, key):
        return [item for item in list(self.values.items()) if item[0].startswith(key + "/")]

    def blocking_key_value_get(self, key, timeout_in_ms):
        raise NotImplementedError


class Process:
    """One process: `failures` has the clauses that it would end with."""

    def __init__(self, store, index):
        self.failures, self.ended = [], threading.Event()
        self.liveness = liveness.Liveness(store, index, 2, self.end)

    def end(self, failure):
        self.failures.append(failure)
        self.ended.set()


@pytest.fixture
def two(monkeypatch):
    for name, seconds in {"POLL_SECONDS": 0.005, "BEAT_SECONDS": 0.01, "LOST_SECONDS": 0.4}.items():
        monkeypatch.setattr(liveness, name, seconds)
    store = Store()
    processes = [Process(store, index) for index in range(2)]
    yield store, processes
    store.running.set()
    for process in processes:
        process.liveness.close()


def test_process_without_signs_of_life_is_reported_to_all(two):
    store, (first, second) = two
    second.liveness._beat = lambda value: None  # as if it was stopped
    for process in (first, second):
        assert process.ended.wait(20)
        assert set(process.failures) == {"process 1 was lost: no heartbeat for 0.4 s"}
    assert store.values[liveness.FAILURE] in first.failures


def test_process_that_ended_without_error_is_not_reported(two):
    store, (first, second) = two
    second.liveness.close()
    assert store.values[f"{liveness.ALIVE}/1"] == liveness.LEFT
    time.sleep(3 * liveness.LOST_SECONDS)
    assert first.failures == []


def test_failure_of_a_process_ends_the_others(two):
    store, processes = two
    store.key_value_set(liveness.FAILURE, "process 1 failed: broken")
    for process in processes:
        assert process.ended.wait(20)
        assert set(process.failures) == {"process 1 failed: broken"}


def test_error_of_the_connection_that_does_not_pass_is_the_end_of_process_0(two, monkeypatch):
    monkeypatch.setattr(liveness, "LOST_SECONDS", 1)
    store, (_, second) = two

    def refuse(key):
        raise RuntimeError("UNAVAILABLE: Socket closed\nstack")

    monkeypatch.setattr(store, "key_value_try_get", refuse)
    assert second.ended.wait(20)
    assert set(second.failures) == {"process 0 was lost: no answer for 1 s: UNAVAILABLE: Socket closed"}


def test_process_0_that_does_not_answer_is_reported(monkeypatch):
    monkeypatch.setattr(liveness, "LOST_SECONDS", 1)
    store = Store()
    store.running.clear()
    second = Process(store, 1)
    assert second.ended.wait(20)
    assert second.failures == ["process 0 was lost: no answer for 1 s"]
    store.running.set()
    second.liveness.close()
