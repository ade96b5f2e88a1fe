"""A network of machines that can be cut: each is a network namespace, joined by a router in one of its own.

The host is unchanged except for one leg into the router, which makes the test itself one of the machines. A cut drops
packets in the router: nothing is notified, nothing is reset, and a counter says how many were dropped. All of it is
gone when the context ends. Needs root, iproute2, nftables and util-linux.
"""

import contextlib
import itertools
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from harness.faults import delay
from shoal.types.codes import Code, refuse

TEST_MACHINE = "test"
"""The name of the test's own leg."""
CHAIN = ("inet", "shoal", "forward")
DELAY_TABLE = "100"
"""The router's table for packets that have not been delayed yet."""
CONGESTION_CONTROL = "cubic"
"""Linux's default. Under `bbr` (version 1), which some machines use, a connection that never fills its path sends at
most four packets for 200 ms and a round trip, every ten seconds, to measure it (ProbeRTT in Cardwell et al., BBR:
Congestion-Based Congestion Control, 2016): over 100 ms, requests then take two or three times as long."""
_NUMBERED = itertools.count()
"""One process may have several networks at a time."""


class NetnsNetwork:
    """Machines by name, with one address each, between `open` and `close`."""

    def __init__(self, machines: Sequence[str]) -> None:
        """At most 62 machines. Raises ShoalError if namespaces cannot be made: such a run covers nothing."""
        nth = next(_NUMBERED)
        # 198.18.0.0/15 is for benchmarks between networks (RFC 2544), so it leads nowhere else.
        self._subnet = f"198.{18 + os.getpid() % 2}.{(os.getpid() // 2 + 97 * nth) % 256}"
        self._numbers = {name: number for number, name in enumerate((TEST_MACHINE, *machines))}
        self._prefix = f"shoal{os.getpid() % 100000}{chr(ord('a') + nth % 26)}"
        self._router = f"{self._prefix}-r"
        self._marks = itertools.count(1)

    def open(self) -> None:
        try:
            self._build()
        except subprocess.CalledProcessError as cause:
            self.close()
            raise refuse(
                Code.NOT_FOUND, f"{cause.stderr.strip()}", "root, ip, nft", "apt-get install iproute2 nftables"
            ) from cause
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove everything; processes inside must have ended."""
        for name in (*(self.namespace(one) for one in self._numbers if one != TEST_MACHINE), self._router):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{self._prefix}-0"], capture_output=True, check=False)

    def address(self, machine: str) -> str:
        return f"{self._subnet}.{4 * self._numbers[machine] + 2}"

    def namespace(self, machine: str) -> str:
        return f"{self._prefix}-{self._numbers[machine]}"

    def inside(self, machine: str) -> tuple[str, ...]:
        """What a command line begins with to run on that machine. Only the network differs."""
        return ("nsenter", f"--net=/run/netns/{self.namespace(machine)}", "--")

    # faults

    def cut(self, source: str, target: str = "") -> str:
        """Drop packets from `source` to `target` (empty: to all) from now on; returns the cut's name, for
        `packets_dropped` and `heal`."""
        name = f"cut{next(self._marks)}"
        match = ["ip", "saddr", self.address(source), *(("ip", "daddr", self.address(target)) if target else ())]
        self._drop(name, match)
        return name

    def isolate(self, machine: str, *, but: str = "") -> tuple[str, str]:
        """Cut it off in both directions, from all machines except that one."""
        names = f"cut{next(self._marks)}", f"cut{next(self._marks)}"
        for name, (near, far) in zip(names, (("saddr", "daddr"), ("daddr", "saddr")), strict=True):
            others = ["ip", far, "!=", self.address(but)] if but else []
            self._drop(name, ["ip", near, self.address(machine), *others])
        return names

    def drop_share(self, machine: str, share: float) -> tuple[str, str]:
        """Drop that share of its packets at random, in each direction."""
        names = f"loss{next(self._marks)}", f"loss{next(self._marks)}"
        for name, side in zip(names, ("saddr", "daddr"), strict=True):
            limit = ["numgen", "random", "mod", "1000", "<", str(round(1000 * share))]
            self._drop(name, ["ip", side, self.address(machine), *limit])
        return names

    def heal(self, *names: str) -> None:
        """End these faults; without names, all."""
        for name in names or tuple(rule["comment"] for rule in self._rules()):
            handle = next(rule["handle"] for rule in self._rules() if rule["comment"] == name)
            self._nft("delete", "rule", *CHAIN, "handle", str(handle))

    @contextlib.contextmanager
    def bandwidth_limit(self, machine: str, bytes_per_s: int, queue_s: float = 0.4) -> Iterator[None]:
        """Limit its leg in each direction; excess packets queue for `queue_s`, then they are dropped."""
        number = self._numbers[machine]
        ends = ((self.namespace(machine), f"{self._prefix}-{number}"), (self._router, f"r{number}"))
        limits = ("rate", f"{bytes_per_s}bps", "burst", "16kb", "latency", f"{round(1000 * queue_s)}ms")
        try:
            for place, device in ends:
                self._run("tc", "-n", place, "qdisc", "add", "dev", device, "root", "tbf", *limits)
            yield
        finally:
            for place, device in ends:
                undo = ("tc", "-n", place, "qdisc", "del", "dev", device, "root")
                subprocess.run(undo, capture_output=True, check=False)

    @contextlib.contextmanager
    def latency(self, delay_s: float, command_prefix: Sequence[str] = ()) -> Iterator[None]:
        """Delay every packet between two machines, in each direction, by `delay_s` and the forwarding process's own
        time. command_prefix: of that process."""
        legs = [f"r{number}" for number in self._numbers.values()]
        with delay.delay_device((*command_prefix, "ip", "netns", "exec", self._router), delay_s):
            try:
                self._ip("-n", self._router, "route", "add", "default", "dev", delay.DEVICE, "table", DELAY_TABLE)
                for leg in legs:
                    self._ip("-n", self._router, "rule", "add", "iif", leg, "lookup", DELAY_TABLE)
                yield
            finally:
                for leg in legs:
                    rule = ("ip", "-n", self._router, "rule", "del", "iif", leg)
                    subprocess.run(rule, capture_output=True, check=False)

    def bytes_carried(self, machine: str) -> int:
        """Bytes from and to the machine so far."""
        leg = f"r{self._numbers[machine]}"
        (told,) = json.loads(self._run("ip", "-n", self._router, "-s", "-j", "link", "show", "dev", leg))
        return int(told["stats64"]["rx"]["bytes"]) + int(told["stats64"]["tx"]["bytes"])

    def packets_dropped(self, *names: str) -> int:
        """Packets that these cuts dropped so far; fails unless each is in force."""
        found = {rule["comment"]: rule for rule in self._rules()}
        return sum(_packets(found[name]) for name in names)

    # building

    def _build(self) -> None:
        self._ip("netns", "add", self._router)
        for key in ("net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0"):
            self._run("ip", "netns", "exec", self._router, "sysctl", "-qw", key)
        for name, number in self._numbers.items():
            here, there = f"{self._prefix}-{number}", f"r{number}"
            self._ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", self._router)
            where: tuple[str, ...] = ()
            if name != TEST_MACHINE:
                self._ip("netns", "add", self.namespace(name))
                self._ip("link", "set", here, "netns", self.namespace(name))
                where = ("-n", self.namespace(name))
                self._ip(*where, "link", "set", "lo", "up")
            gateway = f"{self._subnet}.{4 * number + 1}"
            self._ip("-n", self._router, "addr", "add", f"{gateway}/30", "dev", there)
            self._ip("-n", self._router, "link", "set", there, "up")
            self._ip(*where, "addr", "add", f"{self.address(name)}/30", "dev", here)
            self._ip(*where, "link", "set", here, "up")
            road = ("route", "add", f"{self._subnet}.0/24", "via", gateway, "congctl", CONGESTION_CONTROL)
            self._ip(*where, *road)
        self._nft("add", "table", "inet", "shoal")
        self._nft("add", "chain", *CHAIN, "{ type filter hook forward priority 0; }")

    def _drop(self, name: str, match: Sequence[str]) -> None:
        self._nft("add", "rule", *CHAIN, *match, "counter", "drop", "comment", f'"{name}"')

    def _rules(self) -> list[dict[str, Any]]:
        told = json.loads(self._nft("-j", "list", "chain", *CHAIN))
        return [entry["rule"] for entry in told["nftables"] if "rule" in entry]

    def _nft(self, *words: str) -> str:
        return self._run("ip", "netns", "exec", self._router, "nft", *words)

    def _ip(self, *words: str) -> None:
        self._run("ip", *words)

    def _run(self, *command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _packets(rule: dict[str, Any]) -> int:
    return sum(int(each["counter"]["packets"]) for each in rule["expr"] if "counter" in each)


@contextlib.contextmanager
def network(machines: Sequence[str]) -> Iterator[NetnsNetwork]:
    found = NetnsNetwork(machines)
    found.open()
    try:
        yield found
    finally:
        found.close()
