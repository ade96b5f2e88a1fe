"""What is to be sent leaves once after the event, and in the same turn of the loop where nothing else is due."""

import asyncio

from shoal.host.flush_queue import flush_queue


async def run_callbacks() -> None:
    """Return when what is due now has run."""
    turn = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(turn.set_result, None)
    await turn


async def test_outside_of_an_event_it_leaves_in_the_next_turn() -> None:
    queue, sent = flush_queue(), list[str]()
    queue.add(lambda: sent.append("a"), may_wait=False)
    queue.add(lambda: sent.append("b"), may_wait=False)
    assert sent == []
    await run_callbacks()
    assert sent == ["a", "b"]


async def test_after_an_event_what_may_wait_leaves_in_the_next_turn_with_all_that_is_due() -> None:
    queue, sent = flush_queue(), list[str]()
    for name, may_wait in (("a", True), ("b", False)):
        queue.begin_event()
        queue.add(lambda name=name: sent.append(name), may_wait=may_wait)  # type: ignore[misc]
        queue.end_event()
    assert sent == []
    await run_callbacks()
    assert sent == ["a", "b"]


async def test_one_that_fails_does_not_keep_others_from_leaving() -> None:
    queue, sent, errors = flush_queue(), list[str](), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(str(context["exception"])))
    queue.begin_event()
    queue.add(lambda: [][0], may_wait=False)
    queue.add(lambda: sent.append("b"), may_wait=False)
    queue.end_event()
    assert sent == ["b"]
    assert len(errors) == 1
    assert queue.begin_event(), "the next event is one of its own"
    queue.end_event()


async def test_after_an_event_it_leaves_at_once_if_nothing_else_is_due() -> None:
    queue, sent = flush_queue(), list[str]()
    assert queue.begin_event()
    assert not queue.begin_event(), "an event within an event"
    queue.add(lambda: sent.append("a"), may_wait=False)
    assert sent == []
    queue.end_event()
    assert sent == ["a"]


async def test_after_an_event_among_others_it_leaves_with_what_they_send() -> None:
    queue, sent = flush_queue(), list[str]()
    for name in ("a", "b"):
        asyncio.get_running_loop().call_soon(sent.append, f"another callback {name}")
        assert queue.begin_event()
        queue.add(lambda name=name: sent.append(name), may_wait=False)  # type: ignore[misc]
        queue.end_event()
    assert sent == []
    await run_callbacks()
    assert sent == ["another callback a", "a", "b", "another callback b"]
