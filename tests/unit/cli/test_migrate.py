"""Watching moves from the command line."""

from typing import cast

import pytest

from shoal.cli.commands.migrate import follow
from shoal.client import Region
from shoal.types.codes import Code, ShoalError
from shoal.v1 import operator_pb2


class Listed:
    """The API of a region that lists these migrations, one answer after the other; the last again and again."""

    def __init__(self, *answers: tuple[operator_pb2.MigrationView, ...]) -> None:
        self._answers = list(answers)

    def get(self, kind: str) -> operator_pb2.GetReply:
        assert kind == "migrations"
        found = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return operator_pb2.GetReply(migrations=found)


def view(name: str, stage: str) -> operator_pb2.MigrationView:
    return operator_pb2.MigrationView(id=name, stage=stage)


def test_it_returns_when_all_are_over() -> None:
    api = Listed((view("m-1", "staging"), view("m-2", "done")), (view("m-1", "aborted"), view("m-2", "done")))
    ended = follow(cast(Region, api), [view("m-1", "planned"), view("m-2", "planned")])
    assert [one.stage for one in ended] == ["aborted", "done"]


def test_one_that_is_listed_no_more_ends_the_watch() -> None:
    api = Listed((view("m-other", "done"),))
    with pytest.raises(ShoalError) as caught:
        follow(cast(Region, api), [view("m-1", "planned")])
    assert caught.value.code is Code.MIGRATION_UNKNOWN
