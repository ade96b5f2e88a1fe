"""Entry point of the program of the identity: `python -m shoal.agent.identity.program ORDER`, with the order on
standard input and its answer on standard output, one line of JSON each.

It does what needs private keys or the cryptography library, and ends: 9 MB that the supervisor needs for a second of
its weeks. What it has done is in files that are replaced as a whole.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, get_args

from shoal.agent.identity.orders import (
    Answer,
    ForwardKeyOrder,
    JoinOrder,
    Order,
    RenewOrder,
    SignOrder,
    VerifyOrder,
)
from shoal.agent.packing import pack, unpack
from shoal.host.private_files import disable_core_dumps
from shoal.types.codes import ShoalError


def _join(order: JoinOrder) -> Answer:
    # Each order imports what it needs: enrolling brings gRPC, which signing does without.
    from shoal.agent.identity.certificate import join

    join(Path(order.state_dir), order.addresses, order.token, name=order.name, labels={}, wall=order.wall)
    return Answer()


def _renew(order: RenewOrder) -> Answer:
    from shoal.agent.identity.certificate import renew

    renew(Path(order.folder), order.addresses, held_ends=order.held_ends, wall=order.wall)
    return Answer()


def _sign(order: SignOrder) -> Answer:
    from shoal.agent.identity.keys import load_key
    from shoal.wire.signing import sign

    key = load_key(Path(order.key))
    return Answer(tuple(sign(key, order.region, order.node, order.topic, content) for content in order.contents))


def _verify(order: VerifyOrder) -> Answer:
    from shoal.artifacts.signature_bundle import verify_file

    return Answer(verified=verify_file(order.bundle, order.keys, order.digest))


def _make_forward_key(order: ForwardKeyOrder) -> Answer:
    from shoal.agent.identity.keys import make_forward_key

    make_forward_key(Path(order.path))
    return Answer()


_KINDS: Final[Mapping[str, type[Order]]] = {kind.__name__: kind for kind in get_args(Order)}


def _carry_out(order: Order) -> Answer:
    match order:
        case JoinOrder():
            return _join(order)
        case RenewOrder():
            return _renew(order)
        case SignOrder():
            return _sign(order)
        case VerifyOrder():
            return _verify(order)
        case ForwardKeyOrder():
            return _make_forward_key(order)


def main() -> None:
    disable_core_dumps()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with the answer
    try:
        answer = _carry_out(unpack(_KINDS[sys.argv[1]], sys.stdin.buffer.read()))
    except ShoalError as error:
        answer = Answer(refusal=error.refusal)
    except Exception:
        # Imported when there is something to log, because most programs end without a line.
        from shoal.host import logs

        logs.configure(process="identity")
        raise
    with answers:
        answers.write(pack(answer))


if __name__ == "__main__":
    main()
