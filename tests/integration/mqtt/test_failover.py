"""An agent that is given both links, behind a network that cuts long-lived HTTP/2 until it does so no more."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from integration.mqtt.region import NAME

from harness.cluster.agents import AgentProcess
from harness.cluster.coordinator import CoordinatorServer
from harness.cluster.stack import DevStack, InferenceLoad
from harness.faults.tcp_proxy import TcpProxy, tcp_proxy_in_thread
from harness.wait import wait_until

NODE = "plain-cpu"
FALLS_BACK_S = 60.0
RETURNS_S = 60.0
"""It looks whether gRPC is back after 7.5 to 15 s."""


@contextmanager
def agent_with_both_links(stack: DevStack, proxy: TcpProxy) -> Iterator[AgentProcess]:
    """The stack's agent, started again with both links, gRPC by `way`."""
    stack.kill(NODE)
    coordinator = CoordinatorServer(stack.folder, enrol=f"127.0.0.1:{stack.port('coordinator', 'enrol')}")
    flags = ("--coordinator", f"127.0.0.1:{proxy.port}", "--mqtt", f"127.0.0.1:{stack.port('broker', 'mqtt')}")
    member = AgentProcess(coordinator, stack.control.folder / NODE, NODE, "node", flags=(*flags, "--link", "auto"))
    member.start()
    try:
        yield member
    finally:
        member.end()
        stack.control.break_member(NODE, "resume")


def session_carriers(stack: DevStack) -> list[str]:
    """The carrier of each session of the node, in order."""
    return [line["carrier"] for line in stack.log_lines("coordinator", "session_opened") if line["node"] == NODE]


def test_an_agent_leaves_grpc_that_is_cut_for_mqtt_and_returns(stack: DevStack) -> None:
    with tcp_proxy_in_thread(stack.port("coordinator", "link")) as way, agent_with_both_links(stack, way) as member:
        wait_until(lambda: session_carriers(stack)[-1] == "grpc", 30.0, "its first session by gRPC")
        placed = [row.assignment.id for row in stack.wait_serving(NAME)]
        workers = stack.workers()
        last = max((event.sequence for event in stack.events()), default=0)
        with InferenceLoad(stack.port("gateway", "data"), stack.client_files, NAME, clients=2, rate=10.0) as load:
            way.max_age_s = 1.0
            wait_until(lambda: session_carriers(stack)[-1] == "mqtt", FALLS_BACK_S, "a session by MQTT")
            cut = way.reset_count
            assert cut >= 2
            load.wait_for(40)
            assert session_carriers(stack)[-1] == "mqtt", "it stays while it is good"
            way.max_age_s = inf
            wait_until(lambda: session_carriers(stack)[-1] == "grpc", RETURNS_S, "a session by gRPC again")
            load.wait_for(40)
        assert way.reset_count == cut, "nothing was cut since"
        assert [line["carrier"] for line in member.log_lines("carrier_changed")] == ["mqtt", "grpc"]
        assert load.verdict().lost_count == 0
        assert stack.workers() == workers, "no model was loaded again"
        assert [row.assignment.id for row in stack.wait_serving(NAME)] == placed
        assert [event.code for event in stack.events(last) if event.workload.name == NAME] == []
