"""Entry point of a driver's process: `python -m shoal.agent.devices.serve MODULE:CLASS`, with its options on
standard input.

Then each line of standard input is a call, and one line of standard output answers it. The process ends with its
supervisor.
"""

import os
import pkgutil
import sys
import time
from typing import BinaryIO

from shoal.agent.devices.calls import DriverAnswer, DriverCall, DriverMethod, FoundDevice
from shoal.agent.driver_port import DeviceDriver, DriverFactory, DriverOptions
from shoal.agent.packing import pack, unpack
from shoal.host.parent_death import end_with_parent
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.units import Elapsed, Wall


class _Clock:
    """Times that only count within this process: the supervisor puts its own on every reading."""

    def now(self) -> Elapsed:
        return Elapsed(time.monotonic())  # noqa: TID251 - nobody else is in this process

    def wall(self) -> Wall:
        return Wall(time.time())  # noqa: TID251


def serve(factory: str, calls: BinaryIO, answers: BinaryIO) -> None:
    """Answer calls until there are no more. A driver that refuses its options answers the first call with that."""
    try:
        make: DriverFactory = pkgutil.resolve_name(factory)
        driver = make(_Clock(), unpack(DriverOptions, calls.readline()))
    except ShoalError as error:
        calls.readline()
        _send(answers, DriverAnswer(refusal=error.refusal))
        return
    for line in calls:
        _send(answers, _answer(driver, unpack(DriverCall, line)))


def _send(answers: BinaryIO, answer: DriverAnswer) -> None:
    answers.write(pack(answer) + b"\n")
    answers.flush()


def _answer(driver: DeviceDriver, call: DriverCall) -> DriverAnswer:
    try:
        match call.method:
            case DriverMethod.DISCOVER:
                devices = driver.discover()
                return DriverAnswer(found=tuple(FoundDevice(each, driver.access(each.name)) for each in devices))
            case DriverMethod.READ:
                return DriverAnswer(reading=driver.read(call.device))
            case DriverMethod.SET_SLEEP:
                return DriverAnswer(seconds=driver.set_sleep(call.device, call.asleep))
    except ShoalError as error:
        return DriverAnswer(refusal=error.refusal)
    except Exception as error:  # a bug of the driver at one call says nothing of the others
        found = f"{type(error).__name__}: {error}"[:300]
        return DriverAnswer(
            refusal=Refusal(Code.DEVICE_UNREACHABLE, found, f"an answer to {call.method}", "mend the driver")
        )


def main() -> None:
    end_with_parent()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a vendor's library prints must not mix with the answers
    serve(sys.argv[1], sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
