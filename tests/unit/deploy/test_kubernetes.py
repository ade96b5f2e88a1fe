"""The manifests of `deploy/kubernetes` as kustomize builds them, without a cluster."""

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from kubernetes_validate import utils

from shoal.agent.main import options as agent
from shoal.coordinator.main import options as coordinator
from shoal.devstack import etcd

ROOT: Final = Path(__file__).parents[3]
FOLDER: Final = ROOT / "deploy" / "kubernetes"
OVERLAYS: Final = sorted(path.parent for path in (FOLDER / "overlays").glob("*/kustomization.yaml"))
VERSIONS: Final = ("1.30", "1.37")
"""Of Kubernetes, the oldest and the newest that the manifests are held against."""
USER: Final = 10001
VARIABLE: Final = re.compile(r"(?<!\$)\$\(([A-Z_]+)\)")

Manifest = dict[str, Any]

utils.schema_contents = functools.cache(utils.schema_contents)  # each call would read megabytes anew


@functools.cache
def kustomize_build(overlay: Path) -> tuple[Manifest, ...]:
    beside = Path(sys.executable).with_name("kubectl")
    program = str(beside) if beside.exists() else shutil.which("kubectl")
    assert program is not None, "kubectl is missing: `make packages` installs one"
    done = subprocess.run([program, "kustomize", str(overlay)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "nothing deprecated"
    return tuple(yaml.load_all(done.stdout, Loader=yaml.CSafeLoader))


@pytest.fixture(params=OVERLAYS, ids=lambda path: path.name)
def manifests(request: pytest.FixtureRequest) -> tuple[Manifest, ...]:
    return kustomize_build(request.param)


def pods(manifests: tuple[Manifest, ...]) -> Iterator[tuple[Manifest, Manifest]]:
    """(what makes them, their spec)."""
    for manifest in manifests:
        if manifest["kind"] in ("StatefulSet", "DaemonSet", "Deployment"):
            yield manifest, manifest["spec"]["template"]["spec"]


def jobs(manifests: tuple[Manifest, ...]) -> Iterator[tuple[Manifest, Manifest]]:
    """(what makes it, its spec): pods that end when their work is done."""
    for manifest in of_kind(manifests, "Job"):
        yield manifest, manifest["spec"]["template"]["spec"]


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def of_kind(manifests: tuple[Manifest, ...], kind: str) -> list[Manifest]:
    return [each for each in manifests if each["kind"] == kind]


def variables(program: str) -> set[str]:
    """Of `run`: every option has one of its name."""
    run = _verbs(agent.parser() if program == "agent" else coordinator.parser_of({}))["run"]
    flags = [flag for action in run._actions for flag in action.option_strings if flag.startswith("--")]
    return {"SHOAL_" + flag.removeprefix("--").replace("-", "_").upper() for flag in flags}


def _verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(next(actions).choices)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid_and_has_no_field_that_kubernetes_would_drop(
    manifests: tuple[Manifest, ...], version: str
) -> None:
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_validator_refuses_what_is_misspelt(manifests: tuple[Manifest, ...]) -> None:
    spoilt = {**of_kind(manifests, "PodDisruptionBudget")[0], "spec": {"maxUnavailible": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(spoilt, VERSIONS[-1], strict=True)


def test_everything_but_the_namespaces_is_in_one_that_is_made(manifests: tuple[Manifest, ...]) -> None:
    made = {each["metadata"]["name"]: each["metadata"]["labels"] for each in of_kind(manifests, "Namespace")}
    for manifest in manifests:
        if manifest["kind"] != "Namespace":
            assert manifest["metadata"]["namespace"] in made, manifest["metadata"]
    hosting = {maker["metadata"]["namespace"] for maker, pod in pods(manifests) if _host_paths(pod)}
    for name, labels in made.items():
        level = labels["pod-security.kubernetes.io/enforce"]
        assert level == ("privileged" if name in hosting else "restricted")


def test_every_pod_is_as_the_restricted_standard_wants_it_but_for_what_the_agents_say(
    manifests: tuple[Manifest, ...],
) -> None:
    for maker, pod in (*pods(manifests), *jobs(manifests)):
        name = maker["metadata"]["name"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == USER
        assert pod["securityContext"]["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost")
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & {*pod}
        assert bool(_host_paths(pod)) is (name == "agent")
        for container in containers(pod):
            context = container["securityContext"]
            is_root = (name, container["name"]) == ("agent", "folder")
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"], **({"add": ["CHOWN", "FOWNER"]} if is_root else {})}
            assert context.get("runAsUser", USER) == (0 if is_root else USER)
            assert container["resources"]["requests"]["memory"]
            assert container["resources"]["limits"]["memory"]
        for container in pod["containers"] if maker["kind"] != "Job" else ():
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= {*container}


def test_images_are_those_that_we_build(manifests: tuple[Manifest, ...]) -> None:
    dockerfile = (ROOT / "deploy" / "images" / "Dockerfile").read_text()
    targets = {f"shoal/{name}" for name in re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE)}
    made = (*pods(manifests), *jobs(manifests))
    used = {container["image"] for _, pod in made for container in containers(pod)}
    assert used <= targets & {f"shoal/{name}" for name in _images()}
    assert re.search(rf"useradd --uid {USER} ", dockerfile)


def test_every_variable_is_an_option_of_the_program_and_what_it_refers_to_stands_before_it(
    manifests: tuple[Manifest, ...],
) -> None:
    maps = {(each["metadata"]["namespace"], each["metadata"]["name"]): each for each in of_kind(manifests, "ConfigMap")}
    for maker, pod in pods(manifests):
        for container in pod["containers"]:
            given = {each["name"]: each.get("value", "") for each in container["env"]}
            for source in container.get("envFrom", ()):
                shared = maps[maker["metadata"]["namespace"], source["configMapRef"]["name"]]["data"]
                assert not {*shared} & {*given}, "a variable that another one hides"
                given = {**shared, **given}
            program = container["image"].removeprefix("shoal/")
            ours = {name for name in given if name.startswith("SHOAL_")}
            if program in ("agent", "coordinator"):
                assert ours <= variables(program), program
                assert ("SHOAL_TOKEN_FILE" in ours) is (program == "agent")
            else:
                assert not ours
            seen: set[str] = set()
            for each in container["env"]:
                assert {*VARIABLE.findall(each.get("value", ""))} <= seen, f"{each['name']} comes too early"
                seen.add(each["name"])


def test_programs_take_the_values_that_they_are_given(
    manifests: tuple[Manifest, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what Kubernetes puts in: a pod's own name, namespace, node and address."""
    for maker, pod in pods(manifests):
        for container in pod["containers"]:
            given = _environment(manifests, maker, container)
            for name in (*os.environ, *given):
                if name.startswith("SHOAL_"):
                    monkeypatch.delenv(name, raising=False)
            match container["image"]:
                case "shoal/coordinator":
                    read = coordinator.config_of(coordinator.parser_of(given).parse_args(["run"]))
                    assert read.region == given["SHOAL_REGION"]
                    assert read.advertise.startswith(f"{maker['metadata']['name']}-0.")
                    assert (read.links.count(","), read.store) == ((2, "etcd") if read.links else (0, "sqlite"))
                case "shoal/agent":
                    for name, value in given.items():
                        monkeypatch.setenv(name, value)
                    config = agent.make_config(agent.parser().parse_args(["run"]))
                    assert config.enrol
                    assert config.token_file is not None
                    assert config.listen.port == 8001


def test_no_container_that_serves_sees_the_tokens_of_others(manifests: tuple[Manifest, ...]) -> None:
    """What a stranger's model could read of a pod must not let it join as another node."""
    found = 0
    for _, pod in pods(manifests):
        secrets = {
            each["name"]
            for each in pod.get("volumes", ())
            if each.get("secret", {}).get("secretName", "").endswith("-tokens")
        }
        for container in pod["containers"]:
            mounted = {each["name"] for each in container.get("volumeMounts", ())}
            assert not secrets & mounted, container["name"]
        for container in pod.get("initContainers", ()):
            if secrets & {each["name"] for each in container["volumeMounts"]}:
                found += 1
                assert "/run/shoal/token/token" in container["command"][-1]
        if secrets:
            (server,) = pod["containers"]
            given = {each["name"]: each.get("value") for each in server["env"]}
            assert given["SHOAL_TOKEN_FILE"] == "/run/shoal/token/token"
    assert found >= 2, "gateways and agents"


def test_a_coordinator_holds_the_certificate_of_its_own_user_of_etcd_and_no_member_takes_it_for_another() -> None:
    """What is in which Secret: the guide."""
    manifests = kustomize_build(FOLDER / "overlays" / "two-regions")
    shown = {
        (maker["metadata"]["namespace"], container["name"]): {
            each["secret"]["secretName"] for each in pod.get("volumes", ()) if "secret" in each
        }
        for maker, pod in (*pods(manifests), *jobs(manifests))
        for container in pod["containers"]
    }
    assert shown["shoal-etcd", "etcd"] == {"etcd-member"}
    assert shown["shoal-etcd", "etcd-users"] == {"etcd-root"}
    on_etcd = {space for (space, _), secrets in shown.items() if "etcd-client" in secrets}
    assert on_etcd == {"shoal-east", "shoal-west"}
    assert {name for name, secrets in shown.items() if secrets & {"etcd-member", "etcd-root"}} == {
        ("shoal-etcd", "etcd"), ("shoal-etcd", "etcd-users"),
    }  # fmt: skip
    guide = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    for name in ("etcd-member --from-file=secrets/etcd/member", "etcd-root --from-file=secrets/etcd/root"):
        assert f"secret generic {name}\n" in guide
    assert "-n shoal-$region create secret generic etcd-client --from-file=secrets/etcd/region-$region" in guide
    (member,) = (pod["containers"][0] for maker, pod in pods(manifests) if maker["metadata"]["name"] == "etcd")
    given = {each["name"]: each.get("value") for each in member["env"]}
    assert (given["ETCD_PEER_CLIENT_CERT_AUTH"], given["ETCD_CLIENT_CERT_AUTH"]) == ("true", "true")
    assert given["ETCD_PEER_CERT_ALLOWED_CN"] == etcd.MEMBER_NAME
    (users,) = (pod["containers"][0] for _, pod in jobs(manifests))
    variables = {each["name"]: each["value"] for each in users["env"]}
    read = coordinator.parser_of(variables).parse_args(users["args"])
    regions = [
        each["data"]["SHOAL_REGION"] for each in of_kind(manifests, "ConfigMap") if "SHOAL_REGION" in each["data"]
    ]
    of_regions = [f"region/{name}" for name in regions if f"shoal-{name}" in on_etcd]
    assert coordinator.scopes_of(read) == tuple(sorted(of_regions))


def test_ports_that_programs_listen_on_are_those_of_containers_probes_and_services(
    manifests: tuple[Manifest, ...],
) -> None:
    ports: dict[tuple[str, str], dict[str, int]] = {}
    for maker, pod in pods(manifests):
        for container in pod["containers"]:
            named = {port["name"]: port["containerPort"] for port in container["ports"]}
            ports[maker["metadata"]["namespace"], _component(maker["spec"]["template"])] = named
            listened = [
                int(each["value"].rpartition(":")[2])
                for each in container["env"]
                if re.fullmatch(r"(https://)?0\.0\.0\.0:\d+", each.get("value", ""))
            ]
            assert sorted(listened) == sorted(named.values())
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                asked = container[probe].get("httpGet") or container[probe].get("tcpSocket") or {}
                assert "exec" in container[probe] or asked["port"] in named
                # over plain HTTP only where nothing else is served, and not to clients
                plain = asked.get("scheme", "HTTP") == "HTTP" and "httpGet" in container[probe]
                assert not plain or asked["port"] == "health"
    for service in of_kind(manifests, "Service"):
        selector = service["spec"]["selector"]
        served = ports[service["metadata"]["namespace"], _component({"metadata": {"labels": selector}})]
        for port in service["spec"]["ports"]:
            assert served[port["name"]] == port["port"]


def test_every_set_has_its_service_and_a_budget_and_policies_that_refuse_the_rest(
    manifests: tuple[Manifest, ...],
) -> None:
    names = {(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in manifests}
    for maker, _ in pods(manifests):
        space, name = maker["metadata"]["namespace"], maker["metadata"]["name"]
        if maker["kind"] == "StatefulSet":
            assert ("Service", space, maker["spec"]["serviceName"]) in names
            assert ("PodDisruptionBudget", space, name) in names
        assert ("NetworkPolicy", space, name) in names
    refused = {
        each["metadata"]["namespace"]
        for each in of_kind(manifests, "NetworkPolicy")
        if each["spec"]["podSelector"] == {} and {*each["spec"]["policyTypes"]} == {"Ingress", "Egress"}
    }
    assert refused == {each["metadata"]["name"] for each in of_kind(manifests, "Namespace")}


def test_an_address_inside_leads_to_a_pod_that_is_there(manifests: tuple[Manifest, ...]) -> None:
    """Of a StatefulSet, by its number, in its namespace."""
    there = {
        f"{maker['metadata']['name']}-{number}.{maker['spec']['serviceName']}.{maker['metadata']['namespace']}.svc"
        for maker, _ in pods(manifests)
        if maker["kind"] == "StatefulSet"
        for number in range(maker["spec"]["replicas"])
    }
    said = [(each["metadata"].get("namespace", ""), text) for each in manifests for text in _texts(each)]
    dialled = {
        host.replace("$(POD_NAMESPACE)", space)
        for space, text in said
        for host in re.findall(r"[a-z]+-\d\.[a-z]+\.[a-zA-Z0-9$()_-]+\.svc", text)
    }
    assert dialled
    assert dialled <= there


def test_no_secret_is_in_the_tree_and_each_that_is_asked_for_is_in_the_guide(manifests: tuple[Manifest, ...]) -> None:
    assert not of_kind(manifests, "Secret")
    guide = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    for _, pod in (*pods(manifests), *jobs(manifests)):
        for volume in pod.get("volumes", ()):
            if "secret" in volume:
                assert f"secret generic {volume['secret']['secretName']}" in guide
                assert volume["secret"]["defaultMode"] == 0o440


def test_every_folder_is_of_some_overlay() -> None:
    """What no overlay builds would be checked by nobody."""
    used = set(OVERLAYS)
    for path in FOLDER.rglob("kustomization.yaml"):
        listed = yaml.safe_load(path.read_text())
        for each in (*listed.get("resources", ()), *listed.get("components", ())):
            used.add((path.parent / each).resolve())
    assert {path.parent for path in FOLDER.rglob("kustomization.yaml")} <= used


def _environment(manifests: tuple[Manifest, ...], maker: Manifest, container: Manifest) -> dict[str, str]:
    """Of the set's first pod."""
    space, name = maker["metadata"]["namespace"], maker["metadata"]["name"]
    fields = {
        "metadata.name": f"{name}-0",
        "metadata.namespace": space,
        "spec.nodeName": "node-1.example",
        "status.podIP": "10.1.2.3",
    }
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        (shared,) = (
            each["data"]
            for each in of_kind(manifests, "ConfigMap")
            if each["metadata"]["name"] == source["configMapRef"]["name"] and each["metadata"]["namespace"] == space
        )
        found |= shared
    for each in container["env"]:
        value = fields[each["valueFrom"]["fieldRef"]["fieldPath"]] if "valueFrom" in each else each["value"]
        found[each["name"]] = VARIABLE.sub(lambda match: found[match.group(1)], value)
    return found


def _images() -> list[str]:
    found = re.search(r"^IMAGES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return found.group(1).split()


def _host_paths(pod: Manifest) -> list[str]:
    return [volume["hostPath"]["path"] for volume in pod.get("volumes", ()) if "hostPath" in volume]


def _component(template: Manifest) -> str:
    labels: dict[str, str] = template["metadata"]["labels"]
    return labels.get("app.kubernetes.io/component", labels["app.kubernetes.io/name"])


def _texts(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for each in value.values():
                yield from _texts(each)
        case list():
            for each in value:
                yield from _texts(each)
