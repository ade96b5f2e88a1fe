"""`tests/style/log_events.py`: what it refuses."""

import ast
from pathlib import Path

import pytest
from style import log_events

ROOT = Path(__file__).parents[3]
KNOWN = {"store_copied": "The copy was made.", "front_down": "It does not serve."}


@pytest.mark.parametrize(
    ("call", "check"),
    [
        ('log.info("the store was copied")', "event name"),
        ('log.info("store-copied")', "event name"),
        ('log.info("copied")', "event name"),
        ('log.info("copy_store")', "event name"),
        ('log.info(f"{what}_failed")', "event without a name"),
        ('log.info("store_copied" if done else "front_down")', "event without a name"),
        ("log.info(event)", "event without a name"),
        ("log.info()", "event without a name"),
        ('log.info("store_copied", "to the disk")', "positional text"),
        ('log.info("store_copied: %s", path)', "positional text"),
        ('self._log.error("store_lent")', "private word"),
        ('structlog.get_logger().info("store_lost")', "event without a meaning"),
        ('log.exception("front_down", why="no port")', "field name"),
        ('log.critical("front_down")', "unknown level"),
        ('log.warn("front_down")', "unknown level"),
        ('self._log("front_down", error=True)', "call without a level"),
        ('logger = structlog.get_logger("a")', "logger's name"),
        ("self._out: Log = structlog.get_logger()", "logger's name"),
        ("import logging", "another logger"),
        ("from logging import getLogger", "another logger"),
    ],
)
def test_it_refuses(call: str, check: str) -> None:
    found = [each.check for each in log_events.check_module("agents/a.py", ast.parse(call), KNOWN)]
    assert check in found


@pytest.mark.parametrize(
    "call",
    [
        'log.info("store_copied", duration_s=3.0, error=str(error))',
        'self._log.error("front_down")',
        '_log.exception("front_down", exc_info=error)',
        'log: Final = structlog.get_logger("a")',
        "log.write(text)",
        "math.log(2.0)",
    ],
)
def test_it_lets_pass(call: str) -> None:
    assert list(log_events.check_module("agents/a.py", ast.parse(call), KNOWN)) == []


def test_a_meaning_without_a_call_is_refused() -> None:
    calls = list(log_events.log_calls("agents/a.py", ast.parse('log.info("store_copied")')))
    assert log_events.unused_meanings(calls, KNOWN) == ["front_down"]


def test_a_row_has_what_all_calls_of_the_event_have() -> None:
    text = 'log.info("store_copied", file=a)\nlog.exception("store_copied", folder=b, **more)'
    calls = list(log_events.log_calls("agents/shoal/agent/a.py", ast.parse(text)))
    row = log_events.page(calls, KNOWN).splitlines()[-1]
    assert row == (
        "| `store_copied` | info, error | `agent/a` | `file`, `folder`, `**`, `exception` | The copy was made. |"
    )
