"""The log that a process keeps: small, whole lines, and read on where one left off, across rotations."""

import json
from pathlib import Path

import pytest

from shoal.host import log_files
from shoal.host.log_files import ANSWER_BYTES, LINE_BYTES, RotatingLogFile, escape_line, read
from shoal.types.link import LogLines
from shoal.wire import nouns


def event(number: int, **more: str) -> str:
    stamp = f"2026-01-01T00:{number // 60 % 60:02}:{number % 60:02}.000000Z"
    return json.dumps({**more, "event": f"e{number}", "timestamp": stamp}) + "\n"


def numbers(lines: tuple[str, ...]) -> list[int]:
    return [int(json.loads(line)["event"][1:]) for line in lines]


def test_files_of_several_processes_are_one_log_and_are_read_on(tmp_path: Path) -> None:
    paths = [tmp_path / "front.log", tmp_path / "supervisor.log"]
    logs = [RotatingLogFile(path) for path in paths]
    for number in range(10):
        logs[number % 2].write(event(number))
    page = read(paths, "", 4)
    assert numbers(page.lines) == [6, 7, 8, 9]
    assert not page.more
    assert read(paths, page.after, 4).lines == ()
    for number in range(10, 13):
        logs[number % 2].write(event(number))
    page = read(paths, page.after, 4)
    assert numbers(page.lines) == [10, 11, 12]
    assert {path.stat().st_mode & 0o077 for path in paths} == {0}


def test_nothing_is_lost_or_told_twice_across_a_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "KEPT_BYTES", 3000)
    path = tmp_path / "supervisor.log"
    log, seen, after = RotatingLogFile(path), list[int](), ""
    for number in range(300):
        log.write(event(number))
        if number % 17 == 0:
            page = read(sorted(tmp_path.glob("*.log*")), after, 1000)
            seen, after = seen + numbers(page.lines), page.after
    seen += numbers(read(sorted(tmp_path.glob("*.log*")), after, 1000).lines)
    assert seen == list(range(300))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["supervisor.log", "supervisor.log.1"]
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 2 * 3000 + 200


def test_an_answer_is_bounded_and_says_that_there_is_more(tmp_path: Path) -> None:
    path = tmp_path / "supervisor.log"
    log = RotatingLogFile(path)
    log.write(event(0))
    after = read([path], "", 10).after
    for number in range(1, 2000):
        log.write(event(number, text="x" * 50))
    seen = [0]
    while True:
        page = read([path], after, 10)
        assert sum(map(len, page.lines)) <= ANSWER_BYTES
        seen, after = seen + numbers(page.lines), page.after
        if not page.more:
            break
    assert seen == list(range(2000))
    assert numbers(read([path], "", 5).lines) == list(range(1995, 2000))
    assert len(read([path], "", 10**6).lines) <= 1000


def test_a_place_that_nobody_made_begins_anew_and_half_a_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "supervisor.log"
    log = RotatingLogFile(path)
    log.write(event(0) + event(1).rstrip("\n"))
    for place in ("nonsense", "{}", "[[1]]", '[["a", "b"]]', "[" * 5000):
        assert numbers(read([path], place, 10).lines) == [0], place
    after = read([path], "", 10).after
    log.write("\n")
    assert numbers(read([path], after, 10).lines) == [1]
    log.write("x" * 3 * ANSWER_BYTES)
    assert read([path, tmp_path / "gone.log"], read([path], "", 1).after, 10) is not None


def test_what_a_stranger_calls_a_line_is_one() -> None:
    assert escape_line("a\nb\x1b[31m\x07") == "a\\nb\\x1b[31m\\x07"
    assert len(escape_line("x" * 10**6)) == LINE_BYTES


def test_every_page_is_one_that_a_node_may_send(tmp_path: Path) -> None:
    """Long lines as a traceback makes them, lines that are no text, and more lines than an answer may have."""
    for number in range(3):
        path = tmp_path / f"{number}.log"
        path.write_text("start\n")
    page = read(sorted(tmp_path.glob("*.log")), "", 100)
    for path in tmp_path.glob("*.log"):
        with path.open("ab") as file:
            file.write(b"x" * 7_000 + b"\n\0 \xff" + b"\x0b" * 2_000 + b"\n" + b"short\n" * 3_000)
    told = 0
    while True:
        page = read(sorted(tmp_path.glob("*.log")), page.after, 100)
        message = nouns.from_agent_to_wire(LogLines(1, page.lines, page.after, page.more))
        assert nouns.from_agent_from_wire(message) == LogLines(1, page.lines, page.after, page.more)
        told += len(page.lines)
        if not page.more:
            break
    assert told == 3 * 3_002, "none is left out"
    newest = read(sorted(tmp_path.glob("*.log")), "", 10**6)
    assert nouns.from_agent_from_wire(nouns.from_agent_to_wire(LogLines(1, newest.lines, newest.after, newest.more)))
