"""The compute thread: one thread, in order; exceptions come out, cancelling abandons, and it ends."""

from __future__ import annotations

import threading

import pytest
import trio
import trio.testing

from core.runtime.compute import open_compute_thread

SECONDS = 300


def name_of_this_thread() -> str:
    return threading.current_thread().name


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


async def test_calls_run_one_after_another_in_a_thread_of_that_name() -> None:
    order: list[int] = []
    with trio.fail_after(SECONDS):
        async with open_compute_thread("stage-a") as compute, trio.open_nursery() as nursery:
            assert await compute.run(name_of_this_thread) == "stage-a"
            for number in range(50):
                nursery.start_soon(compute.run, order.append, number)
                await trio.testing.wait_all_tasks_blocked()
    assert order == list(range(50))


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
async def test_an_exception_comes_out_where_the_call_was_made(kind: type[BaseException]) -> None:
    failure = kind("x")

    def fail() -> None:
        raise failure

    with trio.fail_after(SECONDS):
        async with open_compute_thread("stage-b") as compute:
            with pytest.raises(kind) as caught:
                await compute.run(fail)
            assert caught.value is failure
            assert await compute.run(lambda: 7) == 7


async def test_the_event_loop_runs_while_a_call_computes() -> None:
    go = threading.Event()
    with trio.fail_after(SECONDS):
        async with open_compute_thread("stage-c") as compute, trio.open_nursery() as nursery:
            nursery.start_soon(compute.run, go.wait)
            await trio.testing.wait_all_tasks_blocked()
            go.set()


async def test_a_cancelled_call_is_left_to_itself_and_a_waiting_one_never_begins() -> None:
    go, begun, ran = threading.Event(), threading.Event(), []
    with trio.fail_after(SECONDS):
        async with open_compute_thread("stage-d") as compute:

            def long() -> None:
                begun.set()
                go.wait(SECONDS)
                ran.append("long")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(compute.run, long)
                await trio.to_thread.run_sync(begun.wait)
                nursery.start_soon(compute.run, ran.append, "waiting")
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            assert ran == []
            go.set()
            assert await compute.run(lambda: 7) == 7
            assert ran == ["long"]


async def test_the_thread_ends_with_the_block() -> None:
    with trio.fail_after(SECONDS):
        async with open_compute_thread("stage-e") as compute:
            await compute.run(int)
            [thread] = threads("stage-e")
        await trio.to_thread.run_sync(thread.join, SECONDS)
    assert threads("stage-e") == []


async def test_the_thread_ends_with_a_cancelled_block() -> None:
    with trio.fail_after(SECONDS):
        with trio.CancelScope() as scope:
            async with open_compute_thread("stage-f"):
                [thread] = threads("stage-f")
                scope.cancel()
                await trio.sleep_forever()
        await trio.to_thread.run_sync(thread.join, SECONDS)
    assert threads("stage-f") == []


async def test_a_call_that_does_not_end_holds_the_block_for_its_grace_and_no_longer(
    autojump_clock: trio.testing.MockClock,
) -> None:
    go = threading.Event()
    began = trio.current_time()
    with trio.move_on_after(1):
        async with open_compute_thread("stage-g", grace=3) as compute:
            [thread] = threads("stage-g")
            await compute.run(go.wait, SECONDS)
    assert trio.current_time() - began == pytest.approx(4)
    go.set()
    thread.join(SECONDS)
    assert not thread.is_alive()
