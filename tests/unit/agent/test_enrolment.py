"""Who joins by itself: a machine that is no member, or that its region put out."""

import json
import socket
from pathlib import Path

import pytest

from shoal.agent.identity.enrolment import host_name, is_member
from shoal.agent.main.options import make_config, parser
from shoal.types.identity import check_name


def test_a_machine_is_a_member_from_its_certificate_on_until_its_region_refuses_it(tmp_path: Path) -> None:
    identity = tmp_path / "identity"
    assert not is_member(tmp_path), "nothing is there"
    identity.mkdir()
    (identity / "member.json").write_text("{}")
    assert not is_member(tmp_path), "it was cut off before it had a certificate"
    names = ("key.pem", "ca.pem", "cert.pem")
    (identity / "pending.json").write_text(json.dumps(dict.fromkeys(names, "as it came")))
    assert is_member(tmp_path), "it was cut off while it wrote one, which is there now"
    assert {path.name for path in identity.iterdir()} == {"member.json", *names}
    (identity / "expelled").write_text("CERT_REVOKED")
    assert not is_member(tmp_path)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("Kiosk_7.example.org", "kiosk-7"), ("a" * 62 + "-b", "a" * 62), ("-", "node")],
)
def test_the_name_of_a_host_becomes_a_valid_name_of_a_node(
    host: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert check_name(host_name(), "node") == expected


def test_a_service_manager_says_by_variables_with_which_token_and_name_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ENROL", "coordinator:7444"), ("TOKEN_FILE", "/run/secrets/token"), ("NAME", "kiosk-7")):
        monkeypatch.setenv(f"SHOAL_{name}", value)
    found = make_config(parser().parse_args(["run"]))
    assert (found.enrol, found.token_file, found.name) == ("coordinator:7444", Path("/run/secrets/token"), "kiosk-7")
    monkeypatch.setenv("SHOAL_TOKEN", "shoal-join.home.f.1")
    assert make_config(parser().parse_args(["run"])).token == "shoal-join.home.f.1"
    plain = make_config(parser().parse_args(["run", "--name", "other"]))
    assert plain.name == "other", "the command line wins"
