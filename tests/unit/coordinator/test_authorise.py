"""The table of who may call what covers every method of every service, and nothing else."""

from shoal.coordinator.api.authorise import CROSS_REGION_SERVICES, RULES
from shoal.types.device import Role
from shoal.v1 import artifacts_pb2, federation_pb2, link_pb2, operator_pb2

SERVICES = (link_pb2, artifacts_pb2, operator_pb2, federation_pb2)
FOR_STRANGERS = "/shoal.v1.Joining/"
"""With a token, on a port without client certificates."""


def test_a03_every_method_has_a_rule_and_every_rule_a_method() -> None:
    methods = {
        f"/{service.full_name}/{method.name}"
        for module in SERVICES
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert {method for method in methods if not method.startswith(FOR_STRANGERS)} == RULES.keys()


def test_no_tenant_and_no_federation_calls_the_control_port() -> None:
    allowed = frozenset().union(
        *(roles for method, roles in RULES.items() if not method.startswith(CROSS_REGION_SERVICES))
    )
    assert allowed == {Role.AGENT, Role.GATEWAY, Role.OPERATOR, Role.VIEWER, Role.COORDINATOR}
    own = [
        method
        for method, roles in RULES.items()
        if Role.COORDINATOR in roles and not method.startswith(CROSS_REGION_SERVICES)
    ]
    assert own == ["/shoal.v1.Operator/WhoAmI"], "coordinators ask each other who leads, and no more"


def test_other_regions_speak_by_their_coordinators_and_the_federation_only_carries_bids() -> None:
    foreign = {method: roles for method, roles in RULES.items() if method.startswith(CROSS_REGION_SERVICES)}
    assert {method for method, roles in foreign.items() if roles != {Role.COORDINATOR}} == {"/shoal.v1.Peer/Bid"}
    assert foreign["/shoal.v1.Peer/Bid"] == {Role.COORDINATOR, Role.FEDERATION}


def test_viewers_change_nothing_and_nodes_only_hold_sessions_fetch_and_record() -> None:
    reads = {
        "WhoAmI", "Plan", "Get", "History", "Explain", "CanMove", "Events", "Doctor", "List", "GetAuthority",
        "GetFederation", "Trace", "OpenDashboard", "Timeline",
        "ExportMeasurements", "ListMeasurements",
    }  # fmt: skip
    assert {method.rsplit("/", 1)[1] for method, roles in RULES.items() if Role.VIEWER in roles} == reads
    assert {method.rsplit("/", 1)[1] for method, roles in RULES.items() if Role.AGENT in roles} == {
        "Session",
        "Fetch",
        "Record",
    }
