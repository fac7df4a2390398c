"""For how long a process has done nothing, from the processor time that it has used or waited for."""

from waystation.runtime.hosts.idleness import Idleness, Used


def test_a_process_is_idle_since_it_has_used_more_than_a_little() -> None:
    now_s, used = 0.0, Used(0.0, {7: 0.0})
    idleness = Idleness(lambda: used, lambda: now_s)
    now_s = 1.0
    assert idleness.idle_s() == 1.0
    now_s, used = 2.0, Used(0.05, {7: 0.05})  # threads that wake up now and then
    assert idleness.idle_s() == 2.0
    now_s, used = 3.0, Used(0.25, {7: 0.25})
    assert idleness.idle_s() == 0.0
    now_s = 5.0
    assert idleness.idle_s() == 2.0


def test_a_process_that_gets_no_processor_is_not_idle() -> None:
    now_s, used = 0.0, Used(0.0, {7: 0.0})
    idleness = Idleness(lambda: used, lambda: now_s)
    now_s, used = 1.0, Used(0.02, {7: 0.9, 8: 0.1})
    assert idleness.idle_s() == 0.0
    now_s, used = 2.0, Used(0.03, {8: 0.2})  # its thread has ended
    assert idleness.idle_s() == 1.0


def test_a_process_that_was_stopped_was_not_idle_all_that_time() -> None:
    now_s, used = 0.0, Used(0.0, {7: 0.0})
    idleness = Idleness(lambda: used, lambda: now_s)
    now_s = 1.0
    assert idleness.idle_s() == 1.0
    now_s, used = 100.0, Used(0.9, {7: 0.9})  # it computes, and was stopped for most of the time
    assert idleness.idle_s() <= 3.0
    now_s, used = 101.0, Used(1.8, {7: 1.8})
    assert idleness.idle_s() == 0.0


def test_the_time_that_a_process_computes_is_seen() -> None:
    before = Used.here()
    while Used.here().process_s < before.process_s + 0.01:
        sum(range(1000))
