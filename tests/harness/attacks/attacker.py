"""An attacker in its own process, so that its cost is measured apart from its victim's.

`python -m harness.attacks.attacker KIND ADDRESS COUNT [CERTIFICATE KEY]` attacks until its standard input ends. It
prints one JSON line when the attack has begun, and one with its cost at the end.
"""

import asyncio
import json
import os
import resource
import ssl
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

_AT_ONCE = 200
_CONNECT_S = 15.0
"""Seconds after which a connection counts as refused by the server's full queue: the kernel would retry for minutes."""
Files = tuple[str, str] | None


@dataclass
class AttackResult:
    """What the attacker saw: connections opened and refused; of those that stayed, how many the server ended, and the
    longest lifetime of one in seconds."""

    opened: int = 0
    refused: int = 0
    ended: int = 0
    longest_s: float = 0.0


async def half_open(address: str, count: int, files: Files, seen: AttackResult) -> None:
    """Connections that send nothing: each costs the server a descriptor while it waits."""
    await _many(count, lambda: _silent(address, b"", seen))


async def slow_handshakes(address: str, count: int, files: Files, seen: AttackResult) -> None:
    """Handshakes at one byte a second, none of which times out between bytes."""
    hello = _client_hello()
    await _many(count, lambda: _silent(address, hello, seen))


async def junk(address: str, count: int, files: Files, seen: AttackResult) -> None:
    """Bytes that are not TLS, on one connection after another."""

    async def one() -> None:
        with suppress(OSError):
            reader, writer = await _connect(address)
            seen.opened += 1
            writer.write(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(64))
            await reader.read()
            writer.transport.abort()

    await _again_and_again(count, one)


async def reconnect(address: str, count: int, files: Files, seen: AttackResult) -> None:
    """Complete handshakes, each followed by a disconnect: the most expensive request of an unauthenticated client."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    if files is not None:
        context.load_cert_chain(*files)

    async def one() -> None:
        with suppress(OSError):
            _, writer = await _connect(address, context)
            seen.opened += 1
            writer.transport.abort()

    await _again_and_again(count, one)


KINDS: dict[str, Callable[[str, int, Files, AttackResult], Awaitable[None]]] = {
    "half": half_open,
    "drip": slow_handshakes,
    "junk": junk,
    "reconnect": reconnect,
}


async def _silent(address: str, drops: bytes, seen: AttackResult) -> None:
    try:
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await _connect(address)
    except OSError:  # includes TimeoutError
        seen.refused += 1
        return
    start = asyncio.get_running_loop().time()
    seen.opened += 1
    ended = asyncio.create_task(reader.read())
    with suppress(OSError):
        for drop in drops:
            done, _ = await asyncio.wait([ended], timeout=1.0)
            if done:
                break
            writer.write(bytes((drop,)))
        await ended
    seen.ended += 1
    seen.longest_s = max(seen.longest_s, asyncio.get_running_loop().time() - start)
    writer.transport.abort()


async def _connect(
    address: str, context: ssl.SSLContext | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    name = "localhost" if context is not None else None
    return await asyncio.open_connection(host, int(port), ssl=context, server_hostname=name)


async def _many(count: int, one: Callable[[], Awaitable[None]]) -> None:
    """Run all at the same time, opened as fast as the machine can."""
    tasks = []
    for number in range(count):
        tasks.append(asyncio.ensure_future(one()))
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)  # noqa: TID251 - lets those before connect
    await asyncio.gather(*tasks)


async def _again_and_again(count: int, one: Callable[[], Awaitable[None]]) -> None:
    """Run `count` in total, a few at a time."""
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await one()

    await asyncio.gather(*(worker() for _ in range(32)))


def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


async def _main(kind: str, address: str, count: int, files: Files) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    seen = AttackResult()
    attack = asyncio.ensure_future(KINDS[kind](address, count, files, seen))
    print(json.dumps({"event": "attacking"}), flush=True)
    told = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await asyncio.wait([attack, told], return_when=asyncio.FIRST_COMPLETED)
    done = attack.done()
    attack.cancel()
    used = resource.getrusage(resource.RUSAGE_SELF)
    cost = {"cpu_s": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss * 1024, "done": done}
    print(json.dumps({**asdict(seen), **cost}), flush=True)
    os._exit(0)  # the thread that reads standard input may still be waiting


if __name__ == "__main__":
    _kind, _address, _count, *_files = sys.argv[1:]
    asyncio.run(_main(_kind, _address, int(_count), (_files[0], _files[1]) if _files else None))
