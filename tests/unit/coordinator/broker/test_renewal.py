"""The broker's folder beside the coordinator: when its certificate is made anew, and for which hosts."""

from pathlib import Path

import pytest
from cryptography import x509

from shoal.coordinator.broker import config
from shoal.coordinator.broker.renewal import BrokerFolder
from shoal.coordinator.identity.authority import FileAuthority
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall
from shoal.wire.member_files import Enrolled

START = Wall(1_790_000_000.0)
HOSTS = ("mqtt.example.org", "192.0.2.7")


class Region:
    """The region's CA, and the broker's folder as `broker-config` made it."""

    def __init__(self, folder: Path) -> None:
        self.authority = FileAuthority.open(folder / "ca", "home", wall=START, may_create=True)
        self.wall, self.asked = START, list[tuple[str, ...]]()
        self.path = folder / "broker"
        self.enrol(HOSTS).write(self.path)
        self.asked.clear()
        self.folder = BrokerFolder(self.path, self.enrol)

    def enrol(self, hosts: tuple[str, ...]) -> Enrolled:
        self.asked.append(hosts)
        return self.authority.enrol_self(
            Role.BROKER, config.NAME, hosts=hosts, lifetime_s=config.LIFETIME_S, wall=self.wall
        )

    def refresh(self, after_s: float) -> x509.Certificate:
        self.wall = Wall(START + after_s)
        self.folder.refresh(self.authority.ca_pem, self.wall)
        return x509.load_pem_x509_certificate((self.path / "cert.pem").read_bytes())


@pytest.fixture
def region(tmp_path: Path) -> Region:
    return Region(tmp_path)


def test_it_is_made_anew_when_a_third_of_its_time_is_left_for_the_same_hosts(region: Region) -> None:
    first = region.refresh(0.0)
    assert region.refresh(config.LIFETIME_S * 0.6) == first
    assert region.asked == []
    second = region.refresh(config.LIFETIME_S * 0.7)
    names = x509.SubjectAlternativeName
    assert second.extensions.get_extension_for_class(names) == first.extensions.get_extension_for_class(names)
    assert second.not_valid_after_utc > first.not_valid_after_utc
    assert set(HOSTS) <= set(region.asked[0])
    assert len(region.asked) == 1


async def test_it_follows_whom_the_region_trusts_and_who_issues(region: Region) -> None:
    old = region.refresh(0.0)
    await region.authority.begin(START)
    during = region.refresh(1.0)
    assert (region.path / "ca.pem").read_bytes() == region.authority.ca_pem
    assert during.issuer == old.issuer
    await region.authority.promote(START)
    await region.authority.retire(START)
    after = region.refresh(2.0)
    (root,) = x509.load_pem_x509_certificates((region.path / "ca.pem").read_bytes())
    after.verify_directly_issued_by(root)


def test_a_folder_that_is_not_what_it_should_be_stops_nobody(region: Region) -> None:
    (region.path / "cert.pem").write_bytes(b"junk")
    region.folder.refresh(region.authority.ca_pem, START)
    (region.path / "cert.pem").unlink()
    region.folder.refresh(region.authority.ca_pem, START)
    assert region.asked == []


def test_a_pid_of_another_program_gets_no_signal(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = list[int]()
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append(pid))
    (region.path / "pid").write_text("1\n")
    region.refresh(config.LIFETIME_S - Seconds(1.0))
    assert len(region.asked) == 1
    assert killed == []
