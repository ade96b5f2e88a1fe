"""Nothing that looks like a secret, or is called like one, leaves a region; what helps to understand does."""

import json

import pytest

from shoal.cli.redact import REDACTED, redact, redact_flags
from shoal.types.token import JoinToken

JOIN = JoinToken("eu", "ab" * 32, "c2VjcmV0LW9mLTIwLWJ5dGVz").text
PLANTED = "pLaNtEd-SeCrEt-4242"


@pytest.mark.parametrize(
    "text",
    [
        f"authorization: Bearer {PLANTED}",
        f'{{"authorization": "bearer {PLANTED}"}}',
        f"token={PLANTED} more",
        f'{{"api_key":"{PLANTED}"}}',
        json.dumps({"event": json.dumps({"password": PLANTED})}),
        f"https://ana:{PLANTED}@feeds.example/price",
        f"https://feeds.example/price?access_token={PLANTED}&zone=FR",
        f"password: {PLANTED}\n",
        f"SHOAL_TOKEN={PLANTED}",
        f"X-Api-Key: {PLANTED}",
        f"client_secret = '{PLANTED}'",
        f"-----BEGIN EC PRIVATE KEY-----\n{PLANTED}\n-----END EC PRIVATE KEY-----\n",
        json.dumps({"pem": f"-----BEGIN PRIVATE KEY-----\n{PLANTED}\n-----END PRIVATE KEY-----\n"}),
        f"-----BEGIN PRIVATE KEY-----\n{PLANTED}",
    ],
)
def test_a_planted_secret_is_gone(text: str) -> None:
    assert PLANTED not in redact(text)
    assert REDACTED in redact(text)
    assert redact(redact(text)) == redact(text)


def test_tokens_and_keys_as_they_are_made_are_gone() -> None:
    assert JOIN.rpartition(".")[2] not in redact(f"shoal-agent join {JOIN}")
    web = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl"
    assert web not in redact(f"said {web} to it")


def test_what_is_no_secret_stays() -> None:
    for text in (
        "sha256:" + "ab" * 32,
        '{"code": "TOKEN_EXPIRED", "found": "token tok-1 is of yesterday"}',
        '{"event": "leadership_acquired", "term": 3, "timestamp": "2026-01-01T00:00:00Z"}',
        'shoal_coordinator_enrolments_refused_total{code="TOKEN_USED"} 3.0',
        "https://feeds.example/price?zone=FR",
    ):
        assert redact(text) == text


def test_a_flag_is_judged_by_its_name_and_a_file_by_its_content_never() -> None:
    flags = {"etcd_password": "abc", "backup_key_file": "/etc/shoal/backup-key", "link": "127.0.0.1:7443"}
    assert redact_flags(flags) == {**flags, "etcd_password": REDACTED}
