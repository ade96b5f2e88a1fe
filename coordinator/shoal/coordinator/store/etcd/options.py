"""Settings of an etcd store, as flags of `shoal-coordinator`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from shoal.coordinator.ports import StoreOptions, StoreSetting
from shoal.types.codes import Code, refuse

SETTINGS: Final = (
    StoreSetting("endpoints", "its members, over TLS", metavar="HOST:PORT,.."),
    StoreSetting("ca", "the CA of their certificates", metavar="FILE"),
    StoreSetting("cert", "certificate of the region's user; of root for etcd-users", metavar="FILE"),
    StoreSetting("key", "and its key", metavar="FILE"),
    StoreSetting("prefix", "before every key, where etcd is shared", "shoal"),
)


@dataclass(frozen=True, slots=True)
class EtcdOptions:
    """Which etcd, and who this client is."""

    # HOST:PORT of each member.
    endpoints: tuple[str, ...]
    # PEM file of the CA of the members' certificates.
    ca: Path
    # PEM file of this client's certificate.
    certificate: Path
    # PEM file of the certificate's private key.
    key: Path
    # Key prefix before the scope, where etcd is shared with other applications.
    prefix: str

    @classmethod
    def parse(cls, options: StoreOptions) -> Self:
        """Raises ShoalError(FIELD_MISSING | FIELD_INVALID | TLS_REQUIRED)."""
        given = {**{each.name: each.default for each in SETTINGS}, **options.settings}
        endpoints = tuple(_endpoint(each.strip()) for each in given["endpoints"].split(",") if each.strip())
        if not endpoints:
            raise refuse(Code.FIELD_MISSING, "no --etcd-endpoints", "HOST:PORT,...", "name the members of the cluster")
        ca, certificate, key = (given[name] for name in ("ca", "cert", "key"))
        if not (ca and certificate and key):
            raise refuse(
                Code.TLS_REQUIRED,
                "etcd without certificates",
                "--etcd-ca, --etcd-cert and --etcd-key",
                "run etcd with --client-cert-auth, and give this coordinator a certificate of its CA",
            )
        return cls(endpoints, Path(ca), Path(certificate), Path(key), given["prefix"].strip("/"))


def _endpoint(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise refuse(Code.FIELD_INVALID, f"--etcd-endpoints {text!r:.80}", "HOST:PORT,..", "for example etcd-1:2379")
    return text
