"""A folder from which Mosquitto serves one region: `start` in it is all that has to be run.

The broker keeps no message, and its rights are the coordinator's to give: one that lost its file of rights, or finds it
corrupt, starts with those of the coordinator alone, who admits the nodes again.
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
from shoal.types.codes import Code, refuse
from shoal.types.units import Seconds
from shoal.wire.enrol import Enrolled
from shoal.wire.identity import COORDINATOR_USER
from shoal.wire.limits import LINK_BYTES
from shoal.wire.private import write_private

LIFETIME_S: Final = Seconds(90 * 86400.0)
"""Of the broker's certificate. It signs nothing and may call nothing."""
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
"""A link message in its signed envelope, and MQTT's own header."""

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
set_tcp_nodelay true

log_dest stderr
log_type error
log_type warning
log_type notice
"""


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """host, port: where it listens. user: whom it runs as when root starts it. plugin: path at the broker's machine."""

    region: str
    host: str
    port: int
    user: str
    plugin: str


def installed_plugin() -> str:
    """Of this machine. Raises ShoalError(NOT_FOUND)."""
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
    """Makes `folder` (0700) or brings it up to date; a broker that runs reads new certificates on SIGHUP.

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
        user=config.user, port=config.port, host=config.host, plugin=config.plugin, packet_bytes=PACKET_BYTES
    )
    write_private(folder / "mosquitto.conf", conf.encode())
    write_private(folder / "rights.json", json.dumps(document(config.region), indent=1).encode())
    write_private(folder / "start", _START.format(user=config.user, coordinator=COORDINATOR_USER).encode())
    (folder / "start").chmod(0o700)
    if as_root:
        for path in (folder, *folder.iterdir()):
            shutil.chown(path, config.user)


def current_user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name
