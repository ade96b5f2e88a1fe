"""The reference of limits says what the code does."""

import re
from pathlib import Path

from harness.crypto.pki import Authority
from shoal.agent.core import awaited_routes, refusal_pace, shared_memory
from shoal.agent.core.routing import AdmissionLimits
from shoal.agent.core.sequences import SessionLimits
from shoal.agent.dataplane import (
    call_places,
    data_port,
    forward_auth,
    generate,
    health,
    http1,
    json_tensors,
    memory,
    request,
    rest,
    session_handover,
    tensors,
    tracing,
    transport,
    upstream,
    verification_source,
)
from shoal.agent.dataplane import ingress_admission as ingress
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.transport import MAX_REQUEST_ID
from shoal.agent.worker import parsing
from shoal.agent.worker.cgroups import IDLE_BYTES, MAX_TASKS
from shoal.agent.worker.model_runner import MAX_RUN_S
from shoal.agent.worker.pool_options import PoolOptions
from shoal.cli import downloads, oci
from shoal.coordinator.api import compute_pool, models
from shoal.coordinator.api.authorise import MESSAGE_S
from shoal.coordinator.api.dashboard import queries, sessions
from shoal.coordinator.api.dashboard import server as dashboard
from shoal.coordinator.broker import config
from shoal.coordinator.controllers.federation import delegate
from shoal.coordinator.controllers.fleet import controller as fleet
from shoal.coordinator.controllers.fleet import node_events
from shoal.coordinator.controllers.log import events
from shoal.coordinator.core import rate_limit, timeline
from shoal.coordinator.core.federation.rules import REGIONS_MOST, SOLICITATION_BYTES
from shoal.coordinator.core.fleet import labels
from shoal.coordinator.core.graph import check
from shoal.coordinator.core.graph.rules import RULES
from shoal.coordinator.core.migration import queue
from shoal.coordinator.core.negotiation import message_rules
from shoal.coordinator.core.prediction import exchange
from shoal.coordinator.link.grpc import HELLO_S, MAX_INVALID
from shoal.coordinator.main import watchdog
from shoal.coordinator.peers import messages
from shoal.host import http2_session, metrics_page
from shoal.http2 import connection, frames, header_blocks, stream_resets, stream_shares
from shoal.policies.documents import MAX_TOTAL_NODES
from shoal.types.assignment import MAX_INGRESS, MAX_INGRESS_PART, MAX_STATUS_TENSORS, MAX_SUBSCRIPTIONS
from shoal.types.migration import PACK_BYTES
from shoal.types.offer import Directory, Member
from shoal.types.units import Bytes
from shoal.types.workload import SESSION_BYTES
from shoal.wire import limits, request_limits
from shoal.wire.nouns import MAX_ITEMS_BY_FIELD, to_wire

DOCS = Path(__file__).parents[3] / "docs"
MIB = 2**20


def rows() -> dict[str, tuple[str, str]]:
    """By what is limited: the limit and what then happens."""
    text = (DOCS / "reference/limits.md").read_text()
    found = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    return {what: (limit, then) for what, limit, then in found if what not in ("what", "---")}


def _calls_of_one_alone(most: int) -> int:
    shares = stream_shares.StreamShares[None](is_shared=True)
    while shares.may_take("", most):
        shares.take("")
    return shares.total


def _session_limits(front_mib: int) -> SessionLimits:
    limit = front_mib * MIB
    return SessionLimits().within(Bytes(memory.session_budget_bytes(limit, memory.budget_bytes(limit))))


def _session_bytes(limits: SessionLimits) -> str:
    of = limits.total_bytes, limits.tenant_bytes, limits.session_bytes
    return ", ".join(f"{each // MIB} MiB" for each in of)


def _least_front_memory_of_the_largest_session() -> int:
    """MiB."""
    return next(mib for mib in range(256, 1024) if _session_limits(mib).session_bytes == SESSION_BYTES)


def test_a_worker_takes_what_a_front_lets_wait_for_it() -> None:
    assert PoolOptions().queue == AdmissionLimits().per_replica


def test_the_reference_of_limits_is_true() -> None:
    said = {what: limit for what, (limit, _) in rows().items()}
    assert RULES.max_size_bytes == limits.MODEL_BYTES
    assert MESSAGE_S == HELLO_S == ingress.GRACE_S
    assert session_handover.COMMIT_LIMITS == verification_source.LIMITS
    assert "status 27" in rows()["silence of a coordinator's event loop"][1]
    assert int(watchdog.END_SIGNAL) == 27
    assert said == {
        "refusals of callers over their tenant's quota": (
            f"{refusal_pace.AT_ONCE} at once, then one each {refusal_pace.SPACING_S * 1000:.0f} ms; "
            f"{refusal_pace.MAX_WAITING_OF_CALLER} of a caller and {refusal_pace.MAX_WAITING:,} wait"
        ),
        "names of workloads that a front has no routes of: of one tenant, of all, and how long a request waits": (
            f"{awaited_routes.NAMES_PER_TENANT}, {awaited_routes.NAMES:,}; {awaited_routes.WAIT_S:g} s"
        ),
        "workloads that a node subscribes to": f"{MAX_SUBSCRIPTIONS:,}",
        "inference request or answer, expanded": f"{limits.INFER_BYTES // MIB} MiB",
        "message on a link or of an operator": f"{limits.LINK_BYTES // MIB} MiB",
        "model, samples, as one file": f"2 GiB less {2**31 - limits.MODEL_BYTES} byte, {PACK_BYTES // MIB} MiB",
        "a download of `shoal model push`: redirects, an OCI manifest, silence": (
            f"{downloads.REDIRECTS}, {oci.MANIFEST_BYTES // MIB} MiB, {downloads.CONNECT_S:g} s"
        ),
        "message where tokens are redeemed": f"{limits.ENROL_BYTES // 2**10} KiB",
        "TLS and HTTP/2 handshake": f"{limits.HANDSHAKE_S:g} s",
        "one message of a call, an upload's next chunk, a session's hello": f"{MESSAGE_S:g} s",
        "connections at `--link`, at `--enrol`": f"{limits.LINK_CONNECTIONS:,}, {limits.ENROL_CONNECTIONS:,}",
        "connections at a front's data port, and of one address there (of IPv6: of one /64)": (
            f"{limits.DATA_CONNECTIONS:,}, {data_port.CONNECTIONS_PER_ADDRESS:,}"
        ),
        f"pieces of a body over HTTP (chunks, frames), beyond the first {rest.FREE_PIECES:,}": (
            f"{rest.LEAST_PIECE} bytes on average"
        ),
        "silence over HTTP/1.1 there: before the first request, between two": (
            f"{http1.HEAD_TIMEOUT_S:g} s, {http1.IDLE_TIMEOUT_S:g} s"
        ),
        "connections at `--health`, and how long one lasts": f"{health.MAX_CONNECTIONS}, {health.TIMEOUT_S:g} s",
        "connections at a metrics port, of one address there, and how long one lasts": (
            f"{metrics_page.MAX_CONNECTIONS}, {metrics_page.MAX_CONNECTIONS_PER_ADDRESS}, {metrics_page.TIMEOUT_S:g} s"
        ),
        "connections at `--dashboard`, of one address there, and a request's head": (
            f"{dashboard.LIMITS.connections}, {dashboard.LIMITS.connections_per_address}, "
            f"{dashboard.LIMITS.head_bytes // 2**10} KiB"
        ),
        "silence at `--dashboard`: before its handshake, before a request, in a body either way": (
            f"{dashboard.LIMITS.handshake_s:g} s, {dashboard.LIMITS.head_s:g} s, {dashboard.LIMITS.stall_s:g} s"
        ),
        "pages of the dashboard that are open at once, of all and of one caller": (
            f"{dashboard.LIVE_MOST}, {dashboard.LIVE_PER_CALLER}"
        ),
        "links of `shoal dashboard`, sessions, and of one caller; how long they are good for": (
            f"{sessions.LINKS_MOST}, {sessions.SESSIONS_MOST}, {sessions.PER_CALLER_MOST}; "
            f"{sessions.LINK_S:g} s, {sessions.SESSION_S / 3600:g} h"
        ),
        "figures of the last day that a region keeps: workloads, in steps of 10 s and of five minutes": (
            f"{timeline.SUBJECTS_MOST:,}, {timeline.FINE.steps}, {timeline.COARSE.steps}; 42 MB at most, "
            f"and {timeline.COARSE.steps} keys in the store"
        ),
        "documents of one plan preview in the dashboard": f"{queries.PLAN_BYTES // 2**10} KiB",
        "`shoal-request-id`": f"{MAX_REQUEST_ID} characters of printable ASCII",
        "JSON of a REST request beside `data` of its tensors, and strings or values in it": (
            f"{json_tensors.MAX_HEAD_BYTES // MIB} MiB, {json_tensors.MAX_HEAD_VALUES:,}"
        ),
        "body of a `generate` or `generate_stream` request, and values in it": (
            f"{generate.MAX_BODY_BYTES // MIB} MiB, {json_tensors.MAX_HEAD_VALUES:,}"
        ),
        "one string in JSON": f"{json_tensors.MAX_STRING_BYTES // MIB} MiB",
        "a request at its worker, before it is parsed: tensors beyond the model's signature, parameters, strings": (
            f"{parsing.SPARE_ELEMENTS:,}, {parsing.MAX_PARAMETERS:,}, {parsing.MAX_STRINGS:,}"
        ),
        "an answer as JSON": f"{tensors.MAX_JSON_BYTES // MIB} MiB",
        "body of a REST request that carries no tensors": f"{rest.SMALL_BYTES // 2**10} KiB",
        "streams of one connection at `--enrol`": f"{limits.ENROL_STREAMS}",
        "fields of one inference request, before it is parsed": (
            f"{request.MAX_FIELDS:,}; {request.MAX_TENSORS:,} inputs, requested outputs and raw contents, each; "
            f"{request.MAX_PARAMETERS:,} parameters; {request.MAX_STRINGS:,} strings in typed contents"
        ),
        "an inference request beside its tensors' contents": f"{request.MAX_HEAD // MIB} MiB",
        "fields of a session that another agent hands over, before it is parsed": (
            f"{session_handover.OFFER_LIMITS.fields:,}; {request.MAX_TENSORS:,} tensors of state"
        ),
        "fields of what another agent asks for a verification, or to let go of a session": (
            f"{verification_source.LIMITS.fields}"
        ),
        "sessions of one node, at once and a second": f"{fleet.HELLO_BURST}, {fleet.HELLOS_PER_S:g}",
        "inputs, outputs of a model, and characters of the names of each": (
            f"{check.MOST_TENSORS:,}, {check.MOST_NAMES:,}"
        ),
        "silence of a coordinator's event loop": f"{watchdog.LIMIT_S:g} s",
        "calls of all callers at a port of a front; without credentials, and of one address": (
            f"{call_places.CALLS:,}; {ingress.ANONYMOUS_CALLS}, {ingress.ANONYMOUS_PER_ADDRESS}"
        ),
        "regions of shared memory at a front, of one tenant and of all, those that requests still use included": (
            f"{shared_memory.REGIONS_PER_TENANT}, {shared_memory.MAX_REGIONS}"
        ),
        "name of such a region, and of its file": (
            f"{shared_memory.MAX_REGION_NAME}, {shared_memory.MAX_KEY} characters"
        ),
        "a request with what it brings from shared memory": (
            f"{transport.MAX_MESSAGE // MIB} MiB, charged as its bytes are"
        ),
        "calls of one HTTP/2 connection at a front, at once": f"{data_port.MAX_STREAMS}",
        "of these, calls of one tenant that a front forwards over a connection": (
            f"{stream_shares.LEFT_FACTOR} for each that is left: {_calls_of_one_alone(data_port.MAX_STREAMS)} alone"
        ),
        "calls of one client connection that it resets before their messages arrive": (
            f"half of at least {stream_resets.STREAMS}"
        ),
        "HTTP/2 frames of one connection that carry nothing (pings, settings, empty data), at once and a second": (
            f"{connection.OVERHEAD_BURST:,.0f}, {connection.OVERHEAD_PER_S:g}"
        ),
        "header block of a call, and its fields decoded": (
            f"{header_blocks.MAX_BLOCK_BYTES // 2**10} KiB, {header_blocks.MAX_LIST_BYTES // 2**10} KiB"
        ),
        "request of any gRPC method but an inference, and time for it and for its answer": (
            f"{ingress.SMALL_BYTES // 2**10} KiB, {ingress.SMALL_S:g} s"
        ),
        "the next message of a stream": f"{ingress.STREAM_S:g} s",
        "first messages of a caller at once, until one has arrived": (
            f"1, and one more each {'second' if ingress.FIRST_READ_SPACING_S == 1 else ingress.FIRST_READ_SPACING_S}"
        ),
        "bytes of one gRPC stream at a front: before its message is read, under way while it is read": (
            f"{(frames.DEFAULT_WINDOW + 1) // 2**10} KiB, the message's length"
        ),
        "silence before a metrics port's handshake": f"{metrics_page.HANDSHAKE_S:g} s",
        "connections at `--models`, silence there before a request, and in a body either way": (
            f"{models.LIMITS.connections:,}, {models.LIMITS.head_s:g} s, {models.LIMITS.stall_s:g} s"
        ),
        "memory of messages at a front, two copies of each (a request and its answer)": (
            f"half the process's memory limit less {memory.BASELINE_BYTES // MIB} MiB, "
            f"{memory.MIN_BUDGET_BYTES // MIB} MiB to {memory.MAX_BUDGET_BYTES // MIB:,} MiB; "
            "of one tenant half of that"
        ),
        "calls of a port that are answered from their head alone (readiness), of all callers, of one, and of one "
        "tenant": f"{ingress.HEAD_CALLS:,}, {ingress.HEAD_CALLS_PER_CALLER}; {ingress.HEAD_CALLS_PER_PAYER}",
        "calls of a port that wait for news (health), of all callers, of one, and of one tenant": (
            f"{ingress.WATCHES:,}, {ingress.WATCHES_PER_CALLER}; {ingress.WATCHES_PER_PAYER}"
        ),
        "calls of one caller at a front, and streams; calls of one tenant": (
            f"{call_places.CALLS_PER_CALLER}, {call_places.STREAMS_PER_CALLER}; {call_places.CALLS_PER_PAYER:,}"
        ),
        "requests of several tenants that go on to replicas at once, beside those in transit over long RTTs; "
        "beyond, by the tenants' weights": (
            f"{AdmissionLimits().slots}; a tenant within its part of these, or alone, goes on at once"
        ),
        "requests of a tenant with a quota, a second and at once": "as its document says",
        "requests that wait at a front: for each replica, for a gateway of another region, of one tenant": (
            f"{AdmissionLimits().per_replica:,}, {AdmissionLimits().per_way:,}, {AdmissionLimits().per_tenant:,}; "
            "fewer where the answer would come after the deadline, as measured "
            f"({FrontSettings('', '').timeout_s:g} s where a request names none)"
        ),
        "messages on their way in, of one caller for one tenant, of one tenant, of all": (
            f"{ingress.READ_SLOTS_PER_CALLER}, {ingress.READ_SLOTS_PER_PAYER}, {ingress.READ_SLOTS}; "
            f"with a crowd waiting each has {ingress.GRACE_S:g} s; "
            "the tenant with fewest is next, of it the caller with fewest"
        ),
        "output of a connection that its peer does not take, beside one frame of data": (
            f"{http2_session.UNTAKEN_BYTES // MIB} MiB"
        ),
        "answers that one caller does not read": f"{call_places.BYTES_PER_CALLER // MIB} MiB",
        "sessions at a front, of one tenant": f"{SessionLimits().max_sessions:,}, {SessionLimits().per_tenant:,}",
        "bytes of sessions at a front, of one tenant, of one session": (
            f"{_session_bytes(SessionLimits())}; with `--front-memory 256MiB` "
            f"{_session_bytes(_session_limits(256)).replace(' MiB,', ',')}; "
            f"from {_least_front_memory_of_the_largest_session()} MiB on a session has {SESSION_BYTES // MIB} MiB"
        ),
        "messages of one node on its link, at once and a second": (
            f"{rate_limit.MESSAGE_BURST}, {rate_limit.MESSAGES_PER_S:g}"
        ),
        "entries of the event log that one node may cause, at once and a second, and that are kept of it": (
            f"{node_events.EVENT_BURST}, {node_events.EVENTS_PER_S:g}, {events.NODE_EVENTS_KEPT}"
        ),
        "counts of a front by workload and origin: in one status, and that are known of a node": (
            f"{MAX_INGRESS_PART:,}, {MAX_INGRESS:,}"
        ),
        "inputs and outputs of all replicas in one status": f"{MAX_STATUS_TENSORS:,}",
        "events, log lines, observed replicas in one message of a node": (
            f"{MAX_ITEMS_BY_FIELD['NodeEvents.events']}, {MAX_ITEMS_BY_FIELD['LogLines.lines']:,}, "
            f"{MAX_ITEMS_BY_FIELD['Status.observed']:,}"
        ),
        "labels of one node, and characters of a value": f"{labels.MAX_LABELS}, {labels.MAX_VALUE_LENGTH}",
        "forwards of one front that are remembered": f"{forward_auth.MAX_STAMPS:,}",
        "bytes at the broker: on their way to a client, waiting for it, of its heap": (
            f"{config.INFLIGHT_BYTES // MIB} MiB, {config.QUEUED_BYTES // MIB} MiB, {config.MEMORY_BYTES // MIB} MiB"
        ),
        "requests traced at a front in a second, and spans that it keeps": (
            f"{tracing.MAX_TRACES_PER_S}, {tracing.MAX_KEPT_SPANS:,}"
        ),
        "deadline of a request, whatever it says": f"{MAX_RUN_S:g} s",
        "fields of one request of an operator, an agent, a region, a stranger, before it is parsed": (
            f"{request_limits.SMALL.fields}; of a plan {request_limits.PLAN.fields:,} ({request_limits.MAX_TEXTS:,} "
            f"texts, {request_limits.MAX_SOURCES:,} model sources); of a push {request_limits.PUSH.fields:,}; "
            "of an agent's message "
            f"{request_limits.SESSION.fields:,}; of what regions sign {request_limits.ENVELOPE_CONTENT.fields:,}"
        ),
        "YAML values of one plan, in all its texts": f"{MAX_TOTAL_NODES:,}",
        "requests of one caller that the coordinator computes, and of all at once": (
            f"{compute_pool.MAX_REQUESTS_PER_CALLER}, {compute_pool.THREADS}; one at a time of each"
        ),
        "unreadable messages of a session on the link": f"{MAX_INVALID}",
        "a message of a trade between regions, a solicitation, and the answer to either": (
            f"{delegate.MESSAGE_BYTES // 2**10} KiB, {SOLICITATION_BYTES // 2**10} KiB, "
            f"{messages.ANSWER_BYTES // 2**10} KiB"
        ),
        "gateways of another region: to connect to, that may call, that a front begins to connect "
        "to at once": f"{message_rules.GATEWAYS_MOST}, {message_rules.CALLERS_MOST}, {upstream.OPENED_AT_ONCE}",
        "revoked certificates of another region's gateways": f"{message_rules.REVOKED_MOST}",
        "imported measurements: regions, rows of one, bytes of its document": (
            f"{exchange.MOST_REGIONS}, {exchange.MOST_ROWS}, {exchange.MOST_DOCUMENT_BYTES // MIB} MiB"
        ),
        "moves that wait in the queue, of one tenant and of all; those that ended there and are kept": (
            f"{queue.MOST_OF_TENANT}, {queue.MOST}; {queue.KEPT}"
        ),
    }


def test_the_guide_says_what_a_worker_may_take() -> None:
    text = (DOCS / "guides/hardening.md").read_text()
    assert f"its models' and {IDLE_BYTES // MIB} MiB; {MAX_TASKS:,} processes and threads" in text


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
