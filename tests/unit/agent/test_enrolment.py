"""Who joins by itself: a machine that is no member, or that its region put out."""

import json
from pathlib import Path

import pytest

from shoal.agent.identity.enrolment import is_member
from shoal.agent.main.options import make_config, parser


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


def test_a_service_manager_says_by_variables_with_which_token_and_name_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ENROL", "coordinator:7444"), ("TOKEN_FILE", "/run/secrets/token"), ("NAME", "kiosk-7")):
        monkeypatch.setenv(f"SHOAL_{name}", value)
    found = make_config(parser().parse_args(["run"]))
    assert (found.enrol, found.token_file, found.name) == ("coordinator:7444", Path("/run/secrets/token"), "kiosk-7")
    plain = make_config(parser().parse_args(["run", "--name", "other"]))
    assert plain.name == "other", "the command line wins"
