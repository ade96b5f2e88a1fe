"""Renews a context's certificate on use, once two thirds of its lifetime are over."""

import time
from pathlib import Path
from typing import Final

from shoal.client.contexts import Context
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.wire.certificates import identity_of_pem
from shoal.wire.enrol import renew
from shoal.wire.identity import BACKDATED_S
from shoal.wire.member_files import Enrolled, recover_write

RENEW_AT_SHARE: Final = 2 / 3


def renew_context(context: Context) -> Enrolled:
    """Raises ShoalError(FIELD_MISSING | RENEW_DENIED | CERT_UNTRUSTED | COORDINATOR_UNREACHABLE | UNAUTHENTICATED)."""
    if not context.enrolment:
        raise refuse(
            Code.FIELD_MISSING,
            f"context {context.name} does not say where it is renewed",
            "an enrolment server",
            "shoal context login; files of `shoal dev up` and `shoal context add` are kept fresh where they were made",
        )
    renewed = renew(context.enrolment, Path(context.folder))
    renewed.write(Path(context.folder))
    return renewed


def renew_if_due(context: Context) -> Refusal | None:
    """Renew the certificate if it is due. Failures are reported, not raised: the certificate may still be valid for a
    while."""
    recover_write(Path(context.folder))
    try:
        if context.enrolment and is_due(context.certificate):
            renew_context(context)
    except ShoalError as error:
        return error.refusal
    except OSError:
        return None  # no files: their user reports that better
    return None


def is_due(certificate: Path) -> bool:
    """Whether two thirds of its lifetime are over. Raises OSError."""
    identity = identity_of_pem(certificate.read_bytes())
    issued = identity.not_before + BACKDATED_S
    return time.time() >= issued + RENEW_AT_SHARE * (identity.not_after - issued)  # noqa: TID251 - a command's own clock
