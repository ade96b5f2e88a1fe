"""Writes a folder from which Mosquitto serves one region; running `start` in it is all that is needed.

The broker persists no message, and the coordinator manages its access rights. If the rights file is lost or corrupt,
the broker starts with rights for the coordinator alone, which then admits the nodes again.
"""

import json
import os
import pwd
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.coordinator.broker.rights import document
from shoal.host.private_files import write_private
from shoal.types.codes import Code, refuse
from shoal.types.units import Seconds
from shoal.wire.identity import COORDINATOR_USER
from shoal.wire.limits import LINK_BYTES
from shoal.wire.member_files import Enrolled

LIFETIME_S: Final = Seconds(90 * 86400.0)
"""Lifetime of the broker's certificate. It signs nothing and authorises no calls."""
NAME: Final = "broker"
PLUGIN: Final = "mosquitto_dynamic_security.so"
PLUGIN_FOLDERS: Final = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/arm-linux-gnueabihf",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
)
PACKET_BYTES: Final = LINK_BYTES + 256 * 2**10
"""Largest MQTT packet: a link message in its signed envelope, and MQTT's own header."""

INFLIGHT_BYTES: Final = 8 * PACKET_BYTES
"""Bytes in flight to one client: a few of the largest messages, or thousands of heartbeats."""
QUEUED_BYTES: Final = 64 * 2**20
"""Bytes queued for one client: a heartbeat of 2 KiB from each of 1,000 agents for half a minute."""
MEMORY_BYTES: Final = 384 * 2**20
"""Limit of the broker's heap, three quarters of its container's memory, because only a count bounds QoS 0 messages. The
kernel enforces it (`ulimit -d`), not `memory_limit`: with that option, Mosquitto 2.0 ends every connection once its
plugin is told of a change. Above the limit the broker accepts nothing from any sender."""

_START: Final = """#!/bin/sh
# Starts the broker from this folder, wherever it was copied. Mosquitto would go on without any right over a file of
# rights that it cannot read; then the coordinator's own are what it starts with.
set -eu
cd "$(dirname "$0")"
umask 077
PATH=$PATH:/usr/local/sbin:/usr/sbin
rights=dynamic-security.json
count() {{ tr -cd "$1" < $rights | wc -c; }}
if ! grep -aqs '"{coordinator}"' $rights || [ "$(count '{{')" != "$(count '}}')" ]; then
	cp rights.json $rights
	[ "$(id -u)" != 0 ] || chown {user} $rights
fi
echo $$ > pid
ulimit -d {memory_kib}
exec mosquitto -c mosquitto.conf
"""

_CONF: Final = """# Made by `shoal-coordinator broker-config`; made anew when that is run again.
per_listener_settings false
user {user}

# Everybody has a certificate of the region's CA; its common name is who they are.
listener {port} {host}
cafile ca.pem
certfile cert.pem
keyfile key.pem
tls_version tlsv1.2
require_certificate true
use_identity_as_username true
allow_anonymous false
allow_zero_length_clientid false

# Who may do what; all else is denied.
plugin {plugin}
plugin_opt_config_file dynamic-security.json

# The broker is never the truth: after its loss everybody tells everything again.
persistence false
sys_interval 0
persistent_client_expiration 1h

# One reader (the coordinator) of what a whole fleet sends.
max_packet_size {packet_bytes}
max_inflight_messages 1000
max_queued_messages 100000

# A sender that floods while the reader is away: bytes are bounded for each client.
max_inflight_bytes {inflight_bytes}
max_queued_bytes {queued_bytes}
set_tcp_nodelay true

log_dest stderr
log_type error
log_type warning
log_type notice
"""


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """Settings of one region's broker, fixed when its folder is written."""

    # Name of the region that the broker serves.
    region: str
    # Address that the broker listens on.
    host: str
    # TCP port that the broker listens on.
    port: int
    # Unix user that the broker runs as when root starts it.
    user: str
    # Path of the dynamic-security plugin on the broker's machine.
    plugin: str


def find_plugin() -> str:
    """Path of the dynamic-security plugin on this machine. Raises ShoalError(NOT_FOUND)."""
    for folder in PLUGIN_FOLDERS:
        if (Path(folder) / PLUGIN).exists():
            return str(Path(folder) / PLUGIN)
    raise refuse(
        Code.NOT_FOUND,
        "Mosquitto's dynamic-security plugin is not on this machine",
        PLUGIN,
        "install Mosquitto 2.0 (Debian: apt-get install mosquitto), or say with --plugin where it is at the broker",
    )


def write(folder: Path, config: BrokerConfig, identity: Enrolled) -> None:
    """Creates `folder` (0700) or updates it; a running broker reads new certificates on SIGHUP.

    Files belong to `config.user` when root writes them. Raises ShoalError(FIELD_INVALID), OSError.
    """
    for what, value, plain in (
        ("--user", config.user, r"[a-z_][a-z0-9_-]*"),
        ("--plugin", config.plugin, r"/[\w/.+-]+"),
        ("--listen", config.host, r"[\w.:-]+"),
    ):
        if re.fullmatch(plain, value, re.ASCII) is None:
            raise refuse(Code.FIELD_INVALID, f"{what} {value!r:.80}", "a plain name or path", f"give another {what}")
    as_root = os.getuid() == 0
    if as_root and config.user not in {entry.pw_name for entry in pwd.getpwall()}:
        remedy = "install Mosquitto, which makes its own"
        raise refuse(Code.FIELD_INVALID, f"--user {config.user}", "a user of this machine", remedy)
    identity.write(folder)
    conf = _CONF.format(
        user=config.user, port=config.port, host=config.host, plugin=config.plugin, packet_bytes=PACKET_BYTES,
        inflight_bytes=INFLIGHT_BYTES, queued_bytes=QUEUED_BYTES,
    )  # fmt: skip
    write_private(folder / "mosquitto.conf", conf.encode())
    write_private(folder / "rights.json", json.dumps(document(config.region), indent=1).encode())
    write_private(
        folder / "start",
        _START.format(user=config.user, coordinator=COORDINATOR_USER, memory_kib=MEMORY_BYTES // 1024).encode(),
    )
    (folder / "start").chmod(0o700)
    if as_root:
        for path in (folder, *folder.iterdir()):
            shutil.chown(path, config.user)


def current_user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name
