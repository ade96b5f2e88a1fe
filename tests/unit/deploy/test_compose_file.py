"""`docker-compose.yml` as it is written: what no container may lack, and that its parts agree; without an engine."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.coordinator.main import options as coordinator
from shoal.devstack import etcd
from shoal.devstack.compose import NODES, PORT_OFFSETS, published_addresses
from shoal.wire.identity import store_user_of

FILE = Path(__file__).parents[3] / "docker-compose.yml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]
INSIDE = {"link": 7443, "enrol": 7444, "data": 8001, "dashboard": 7448}
SECOND = {"data": 6}
"""Of edge's other gateway."""
REGIONS = ("edge", "cloud", "datacenter")
ROOTS = {"setup", "etcd-files"}
"""Who gives files away."""


def with_defaults(text: str) -> str:
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
    assert service.get("user") == ("root" if name in ROOTS else None)
    assert service.get("cap_add", []) == (["CHOWN", "DAC_OVERRIDE", "FOWNER"] if name in ROOTS else [])
    assert not {"privileged", "pid", "ipc", "devices"} & {*service}
    assert service.get("network_mode", "none") == "none"
    if service["restart"] != "no":
        assert service["healthcheck"]["test"][0] == "CMD"


def test_what_is_published_is_on_loopback_where_setup_says_it_is() -> None:
    told = dict(
        each.removeprefix("--published=").split("=", 1) for each in map(with_defaults, SERVICES["setup"]["command"])
    )
    assert next(iter(told)) == "edge", "the first context in use"
    published: dict[str, str] = {}
    for name, service in SERVICES.items():
        for port in map(with_defaults, service.get("ports", ())):
            outer, _, inner = port.rpartition(":")
            assert outer.startswith("127.0.0.1:"), name
            published[outer] = f"{name}:{inner}"
    assert len(published) == sum(len(service.get("ports", ())) for service in SERVICES.values()), "each port once"
    for region in REGIONS:
        addresses = published_addresses(region, told[region])
        for use in PORT_OFFSETS:
            part = "gateway" if use == "data" else "coordinator"
            assert published.pop(addresses[use]) == f"{region}-{part}:{INSIDE[use]}"
    for use in ("link", "enrol"):
        assert published.pop(published_addresses("federation", told["federation"])[use]) == f"federation:{INSIDE[use]}"
    second = {f"127.0.0.1:710{number}": f"edge-gateway-2:{INSIDE[use]}" for use, number in SECOND.items()}
    assert published == {"127.0.0.1:7090": "prometheus:9090", "127.0.0.1:7091": "grafana:3000", **second}


def test_setup_sees_the_folder_of_every_member_and_writes_only_into_nodes_own() -> None:
    seen = {}
    for volume in SERVICES["setup"]["volumes"]:
        name, path, *mode = with_defaults(volume).split(":")
        if path.startswith("/stack/"):
            region, role, member = path.removeprefix("/stack/").split("/")
            assert name == member, "a volume is called as its container is"
            seen[member] = (region, role, "ro" not in mode)
    members = {name for name, one in SERVICES.items() if image_of(one) in ("shoal/coordinator", "shoal/agent")}
    assert {*seen} == members - {"edge-broker-files", "etcd-users"}
    for name, (region, role, writes) in seen.items():
        assert writes is (role in NODES)
        own = [volume.partition(":")[0] for volume in SERVICES[name]["volumes"] if volume.endswith(":/var/lib/shoal")]
        assert own == [name]
        if role in NODES:
            assert region in SERVICES[name]["networks"]
            assert SERVICES[name]["environment"]["SHOAL_ENROL"] == f"{region}-coordinator:7444"
            assert ("--role=gateway" in SERVICES[name]["command"]) is (role == "gateway")


def volumes_of(name: str) -> dict[str, str]:
    """Folder inside, by volume; with `:ro` behind it where it is not written to."""
    return dict(each.split(":", 1) for each in SERVICES[name].get("volumes", ()) if each.startswith("etcd-"))


def test_each_control_plane_sees_the_certificate_of_its_own_user_of_etcd_and_no_other_key_of_it() -> None:
    """The members' key is mounted by members alone, the CA's by what makes certificates, the administrator's by what
    makes users; and what is made for each of them lies in its volume."""
    made = {folder.removeprefix("/stack/etcd/"): name for name, folder in volumes_of("etcd-files").items()}
    scopes = [each.removeprefix("--scope=") for each in SERVICES["etcd-files"]["command"]]
    assert {*made} == {etcd.AUTHORITY, etcd.MEMBER, etcd.ROOT, *map(store_user_of, scopes)}
    keepers = {}
    for name, service in SERVICES.items():
        if name == "etcd-files":
            continue
        seen = {volume for volume in volumes_of(name) if volume in made.values()}
        keepers[name] = seen
        assert all(volumes_of(name)[volume] == "/srv/etcd:ro" for volume in seen)
        if service.get("environment", {}).get("SHOAL_STORE") == "etcd":
            role, region = (service["environment"].get(f"SHOAL_{each}", "region") for each in ("ROLE", "REGION"))
            assert f"{role}/{region}" in scopes
            assert seen == {made[store_user_of(f"{role}/{region}")]}, name
    assert {name for name, seen in keepers.items() if made[etcd.MEMBER] in seen} == {"etcd-1", "etcd-2", "etcd-3"}
    assert {name for name, seen in keepers.items() if made[etcd.ROOT] in seen} == {"etcd-users", "etcdctl"}
    assert not [name for name, seen in keepers.items() if made[etcd.AUTHORITY] in seen]
    assert all(len(seen) <= 1 for seen in keepers.values())


def test_etcd_takes_its_own_members_alone_for_members_and_has_its_users_before_anybody_keeps_state() -> None:
    for number in (1, 2, 3):
        given = SERVICES[f"etcd-{number}"]["environment"]
        assert (given["ETCD_CLIENT_CERT_AUTH"], given["ETCD_PEER_CLIENT_CERT_AUTH"]) == ("true", "true")
        assert given["ETCD_PEER_CERT_ALLOWED_CN"] == etcd.MEMBER_NAME
    users = SERVICES["etcd-users"]
    assert users["entrypoint"] == ["shoal-coordinator", "etcd-users"]
    read = coordinator.parser_of(users["environment"]).parse_args(["etcd-users", *users["command"]])
    stored = {name: each for name, each in SERVICES.items() if "SHOAL_STORE" in each.get("environment", {})}
    assert {*coordinator.scopes_of(read)} == {
        f"{each['environment'].get('SHOAL_ROLE', 'region')}/{each['environment']['SHOAL_REGION']}"
        for each in stored.values()
    }
    for name, service in stored.items():
        assert service["depends_on"]["etcd-users"] == {"condition": "service_completed_successfully"}, name
