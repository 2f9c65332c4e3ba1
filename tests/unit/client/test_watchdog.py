"""A call that takes too long is cancelled, and no other."""

from __future__ import annotations

import threading

from slotcar_client.transports.watchdog import Watchdog

PATIENCE_SECONDS = 20.0


def test_a_call_over_its_time_is_cancelled() -> None:
    watchdog, cancelled = Watchdog(0.01), threading.Event()
    with watchdog.watch(cancelled.set) as watch:
        assert cancelled.wait(PATIENCE_SECONDS)
        assert watch.expired
    watchdog.close()


def test_calls_in_time_are_left_alone_and_a_later_one_is_not() -> None:
    watchdog, cancelled, late = Watchdog(0.2), threading.Event(), threading.Event()
    for _ in range(100):
        with watchdog.watch(cancelled.set) as watch:
            pass
        assert not watch.expired
    with watchdog.watch(late.set):
        assert late.wait(PATIENCE_SECONDS)
    assert not cancelled.is_set()
    watchdog.close()


def test_after_a_call_over_its_time_the_next_is_watched_too() -> None:
    watchdog = Watchdog(0.01)
    for _ in range(3):
        cancelled = threading.Event()
        with watchdog.watch(cancelled.set):
            assert cancelled.wait(PATIENCE_SECONDS)
    watchdog.close()


def test_close_ends_the_thread_in_any_state() -> None:
    for busy in (False, True):
        watchdog = Watchdog(3600.0)
        watch = watchdog.watch(lambda: None)
        watch.__enter__()
        if not busy:
            watch.__exit__(None, None, None)
        watchdog.close()
        assert watchdog._thread is not None
        watchdog._thread.join(PATIENCE_SECONDS)
        assert not watchdog._thread.is_alive()
    Watchdog(1.0).close()
