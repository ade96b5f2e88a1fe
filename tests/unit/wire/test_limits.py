"""The reference of limits says what the code does."""

import re
from pathlib import Path

from harness.pki import Authority
from shoal.agent.dataplane import intake, rest, tracing
from shoal.agent.worker.groups import IDLE_BYTES, MOST_TASKS
from shoal.agent.worker.service import MAX_RUN_S
from shoal.coordinator.api.authorise import MESSAGE_S
from shoal.coordinator.core.federation.rules import REGIONS_MOST
from shoal.coordinator.link.grpc import HELLO_S, MOST_INVALID
from shoal.types.offer import Directory, Member
from shoal.wire import limits
from shoal.wire.nouns import to_wire

DOCS = Path(__file__).parents[3] / "docs"
MIB = 2**20


def rows() -> dict[str, tuple[str, str]]:
    """By what is limited: the limit and what then happens."""
    text = (DOCS / "reference/limits.md").read_text()
    found = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    return {what: (limit, then) for what, limit, then in found if what not in ("what", "---")}


def test_the_reference_of_limits_is_true() -> None:
    said = {what: limit for what, (limit, _) in rows().items()}
    assert MESSAGE_S == HELLO_S == intake.GRACE_S
    assert said == {
        "inference request or answer, expanded": f"{limits.INFER_BYTES // MIB} MiB",
        "message on a link or of an operator": f"{limits.LINK_BYTES // MIB} MiB",
        "message where tokens are redeemed": f"{limits.ENROL_BYTES // 2**10} KiB",
        "TLS and HTTP/2 handshake": f"{limits.HANDSHAKE_S:g} s",
        "one message of a call, an upload's next chunk, a session's hello": f"{MESSAGE_S:g} s",
        "connections at `--link`, at `--enrol`, at each gRPC port of a front": (
            f"{limits.LINK_CONNECTIONS:,}, {limits.ENROL_CONNECTIONS:,}, {limits.DATA_CONNECTIONS:,}"
        ),
        "connections at `--rest`, and of one address there": (
            f"{rest.MAX_CONNECTIONS:,}, {rest.MAX_CONNECTIONS_PER_ADDRESS}"
        ),
        "streams of one connection at `--enrol`": f"{limits.ENROL_STREAMS}",
        "calls of one caller at a front, and streams": f"{intake.CALLS_PER_CALLER}, {intake.STREAMS_PER_CALLER}",
        "messages on their way in, of one caller and of all": (
            f"{intake.PLACES_PER_CALLER}, {intake.PLACES}; with a crowd waiting each has {intake.GRACE_S:g} s; "
            "the caller with fewest is next"
        ),
        "answers that one caller does not read": f"{intake.BYTES_PER_CALLER // MIB} MiB",
        "requests traced at a front in a second, and spans that it keeps": (
            f"{tracing.TRACED_A_SECOND}, {tracing.KEPT:,}"
        ),
        "deadline of a request, whatever it says": f"{MAX_RUN_S:g} s",
        "unreadable messages of a session on the link": f"{MOST_INVALID}",
    }


def test_the_guide_says_what_a_worker_may_take() -> None:
    text = (DOCS / "guides/hardening.md").read_text()
    assert f"its models' and {IDLE_BYTES // MIB} MiB; {MOST_TASKS:,} processes and threads" in text


def test_who_joins_can_be_told_of_as_many_regions_as_there_may_be(tmp_path: Path) -> None:
    """What is asked where tokens are redeemed stays small; the answer to a region holds the whole directory."""
    root = Authority(tmp_path, "eu", 1.8e9).certificate.read_text()
    members = tuple(
        Member(f"region-{number:04}", f"coordinator.region-{number:04}.example:7447", (root, root), "eu")
        for number in range(REGIONS_MOST)
    )
    options = dict(limits.enrol_options())
    assert to_wire(Directory("fed", 1, members)).ByteSize() < int(options["grpc.max_send_message_length"])
    assert options["grpc.max_receive_message_length"] == limits.ENROL_BYTES
