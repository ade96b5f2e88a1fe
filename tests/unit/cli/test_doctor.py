"""What `shoal doctor` says of the coordinators that it asked itself."""

from shoal.cli.commands.doctor import coordinators
from shoal.types.codes import Code
from shoal.v1.operator_pb2 import WhoAmIReply

LEADS = WhoAmIReply(version="0.2.0", history="h-1")
FOLLOWS = WhoAmIReply(version="0.2.0", follows=True)


def test_who_leads_who_follows_and_who_does_not_answer() -> None:
    checks = list(coordinators({"c1:1": LEADS, "c2:1": FOLLOWS, "c3:1": None}))
    assert [(check.name, check.ok, check.refusal.code) for check in checks] == [
        ("coordinator c1:1 leads", True, ""),
        ("coordinator c2:1 follows", True, ""),
        ("coordinator c3:1", False, Code.COORDINATOR_UNREACHABLE),
    ]


def test_coordinators_of_two_versions_are_told() -> None:
    """Each of them may come to lead, and the older one keeps less of what it writes again."""
    old = WhoAmIReply(version="0.1.0", follows=True)
    *_, mixed = coordinators({"c1:1": LEADS, "c2:1": old, "c3:1": FOLLOWS})
    assert (mixed.ok, mixed.refusal.code) == (False, Code.CONFLICT)
    assert mixed.refusal.found.startswith("0.1.0, 0.2.0")
    assert "--component coordinator" in mixed.refusal.remedy


def test_of_one_coordinator_nothing_is_said() -> None:
    assert not list(coordinators({"c1:1": LEADS}))
