"""`docker-compose.yml` as it is written: what no container may lack, and that its parts agree; without an engine."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.devstack.compose import NODES, PUBLISHED, outside

FILE = Path(__file__).parents[3] / "docker-compose.yml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]
INSIDE = {"link": 7443, "enrol": 7444, "grpc": 8001, "rest": 8000, "token": 8002}
SECOND = {"grpc": 6, "rest": 7, "token": 8}
"""Of edge's other gateway."""
REGIONS = ("edge", "cloud", "datacenter")


def filled(text: str) -> str:
    """With the defaults of its variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def image_of(service: dict[str, Any]) -> str:
    """Without its tag, which is one for all of ours."""
    name, _, tag = service["image"].partition(":")
    assert (tag == "${SHOAL_TAG:-latest}") is name.startswith("shoal/")
    return str(name)


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_has_the_least_that_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["mem_limit"]
    assert service["pids_limit"]
    assert service["logging"]["options"]["max-size"]
    assert service["image"].startswith("shoal/") is (name != "grafana")
    assert service.get("user") == ("root" if name == "setup" else None)
    assert bool(service.get("cap_add")) is (name == "setup")
    assert not {"privileged", "pid", "ipc", "devices"} & {*service}
    assert service.get("network_mode", "none") == "none"
    if service["restart"] != "no":
        assert service["healthcheck"]["test"][0] == "CMD"


def test_what_is_published_is_on_loopback_where_setup_says_it_is() -> None:
    told = dict(each.removeprefix("--published=").split("=", 1) for each in map(filled, SERVICES["setup"]["command"]))
    assert next(iter(told)) == "edge", "the first context in use"
    published: dict[str, str] = {}
    for name, service in SERVICES.items():
        for port in map(filled, service.get("ports", ())):
            outer, _, inner = port.rpartition(":")
            assert outer.startswith("127.0.0.1:"), name
            published[outer] = f"{name}:{inner}"
    assert len(published) == sum(len(service.get("ports", ())) for service in SERVICES.values()), "each port once"
    for region in REGIONS:
        addresses = outside(region, told[region])
        for use in PUBLISHED:
            part = "coordinator" if use in ("link", "enrol") else "gateway"
            assert published.pop(addresses[use]) == f"{region}-{part}:{INSIDE[use]}"
    for use in ("link", "enrol"):
        assert published.pop(outside("federation", told["federation"])[use]) == f"federation:{INSIDE[use]}"
    second = {f"127.0.0.1:710{number}": f"edge-gateway-2:{INSIDE[use]}" for use, number in SECOND.items()}
    assert published == {"127.0.0.1:7090": "prometheus:9090", "127.0.0.1:7091": "grafana:3000", **second}


def test_setup_sees_the_folder_of_every_member_and_writes_only_into_nodes_own() -> None:
    seen = {}
    for volume in SERVICES["setup"]["volumes"]:
        name, path, *mode = filled(volume).split(":")
        if path.startswith("/stack/"):
            region, role, member = path.removeprefix("/stack/").split("/")
            assert name == member, "a volume is called as its container is"
            seen[member] = (region, role, "ro" not in mode)
    members = {name for name, one in SERVICES.items() if image_of(one) in ("shoal/coordinator", "shoal/agent")}
    assert {*seen} == members - {"edge-broker-files"}
    for name, (region, role, writes) in seen.items():
        assert writes is (role in NODES)
        own = [volume.partition(":")[0] for volume in SERVICES[name]["volumes"] if volume.endswith(":/var/lib/shoal")]
        assert own == [name]
        if role in NODES:
            assert region in SERVICES[name]["networks"]
            assert SERVICES[name]["environment"]["SHOAL_ENROL"] == f"{region}-coordinator:7444"
            assert ("--role=gateway" in SERVICES[name]["command"]) is (role == "gateway")
