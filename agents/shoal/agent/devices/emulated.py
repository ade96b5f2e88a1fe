"""Emulated devices: the real model runs on this machine's CPU, paced and metered by a named profile.

`agents/derive_profiles` writes the profiles in `profiles/` from published results, each with its rows named. Every
answer takes the time that was published for the model, or for its nearest relative, x `time_scale`; the capability
receipt, by which the region predicts, is fitted to other results than these.

Every reported figure (latency, joules) is device time, that is
unscaled, and `Device.time_scale` says how much slower the answers came.

A device whose profile gives its idle and sleep power can be put to sleep, as `core.device_sleep` models; no other can.
Heat, throttling and loss of the device are never modelled: the file `options.emulated_state_file` sets them
(`emulated_state.py`).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from shoal.agent.core.device_sleep import DeviceSleepState
from shoal.agent.devices.cpu import NAME as CPU
from shoal.agent.devices.emulated_state import read_state
from shoal.agent.devices.host import Host
from shoal.agent.devices.published import pace_of
from shoal.agent.devices.runtime import runtime_version
from shoal.agent.driver_port import DeviceAccess, DriverClock, DriverOptions, EmulatedPace
from shoal.types.codes import Code, refuse
from shoal.types.device import Device, DeviceKind, DeviceLink, Reading, Rest
from shoal.types.units import SIZE, Bytes, Seconds, Watts, parse_quantity, show_bytes


@dataclass(frozen=True, slots=True)
class _EmulatedDevice:
    device: Device
    pace: EmulatedPace


class EmulatedDriver:
    """One device per entry of `options.emulate`, named after its profile (`-2`, `-3` for further ones)."""

    def __init__(self, clock: DriverClock, options: DriverOptions, root: Path = Path("/")) -> None:
        """Raises ShoalError(FIELD_INVALID) for an unknown profile or an invalid scale, and what parse_quantity raises
        for an invalid size."""
        if not (math.isfinite(options.time_scale) and options.time_scale > 0):
            raise refuse(
                Code.FIELD_INVALID, f"time scale {options.time_scale}", "a number above 0", "leave it out for 1"
            )
        if not (math.isfinite(options.wake_scale) and options.wake_scale >= 0):
            raise refuse(
                Code.FIELD_INVALID, f"wake scale {options.wake_scale}", "a number, 0 or more", "leave it out for 1"
            )
        self._clock = clock
        self._host = Host(root)
        self._state_file = options.emulated_state_file
        self._devices: dict[str, _EmulatedDevice] = {}
        self._sleep_states: dict[str, DeviceSleepState] = {}
        entries = [_parse_entry(entry) for entry in options.emulate]
        for number, (profile, memory) in enumerate(entries):
            earlier = [name for name, _ in entries[:number]].count(profile)
            name = f"{profile}-{earlier + 1}" if earlier else profile
            emulated = self._devices[name] = _make_device(name, load_profile(profile), memory, options, self._host)
            if (rest := emulated.device.rest) is not None:
                self._sleep_states[name] = DeviceSleepState(
                    rest, emulated.pace.active_w, options.time_scale, clock.now()
                )

    def discover(self) -> tuple[Device, ...]:
        return tuple(emulated.device for emulated in self._devices.values())

    def read(self, device: str) -> Reading:
        """Free memory is the device's, limited by this machine's. Temperature comes from the state file; utilisation is
        unknown.

        Power and energy are known only of a device that can sleep, and exclude what runs take beyond idle power.
        """
        emulated, condition = self._device(device), read_state(self._state_file)
        if not condition.answers:
            raise refuse(Code.DEVICE_LOST, f"{device} does not answer, as {self._state_file} says", "one that does", "")
        now, resting = self._clock.now(), self._sleep_states.get(device)
        if resting is not None:
            resting = self._sleep_states[device] = resting.advance(now)
        return Reading(
            device=device,
            free_bytes=Bytes(min(emulated.device.memory_bytes, self._host.free_bytes())),
            utilisation=math.nan,
            temperature_c=condition.temperature_c,
            power_w=resting.watts if resting is not None else Watts(math.nan),
            energy_j=resting.drawn_j if resting is not None else math.nan,
            taken_at=self._clock.wall(),
            throttled=condition.throttled,
            power=resting.power if resting is not None else None,
            slept_s=resting.slept_s if resting is not None else Seconds(0.0),
            saved_j=resting.saved_j if resting is not None else 0.0,
        )

    def access(self, device: str) -> DeviceAccess:
        return DeviceAccess(pace=self._device(device).pace)

    def set_sleep(self, device: str, asleep: bool) -> Seconds:
        resting = self._sleep_states.get(device)
        if resting is None:
            return Seconds(0.0)
        now = self._clock.now()
        resting = self._sleep_states[device] = resting.with_sleep(asleep, now)
        return resting.wakes_in(now)

    def _device(self, device: str) -> _EmulatedDevice:
        if device not in self._devices:
            raise refuse(Code.DEVICE_LOST, f"no emulated device {device!r:.80}", ", ".join(self._devices) or "none", "")
        return self._devices[device]


def profiles() -> tuple[str, ...]:
    """Names of all profiles."""
    return tuple(
        sorted(
            entry.name.removesuffix(".json") for entry in _profiles_folder().iterdir() if entry.name.endswith(".json")
        )
    )


def _parse_entry(entry: str) -> tuple[str, Bytes | None]:
    """(profile, memory size or None for the profile's) of `PROFILE` or `PROFILE=SIZE`."""
    profile, equals, size = entry.partition("=")
    return profile, Bytes(int(parse_quantity(size, SIZE))) if equals else None


def _make_device(
    name: str, profile: Mapping[str, Any], size: Bytes | None, options: DriverOptions, host: Host
) -> _EmulatedDevice:
    """size: of its memory; None: the profile's, or the host's where it works in that."""
    rest, time_scale = _sleep_profile(profile["rest"], options.wake_scale), options.time_scale
    pace = pace_of(
        profile,
        size if size is not None else Bytes(profile["memory_bytes"] or host.limit_bytes()),
        time_scale=time_scale,
        idle_w=rest.idle_w if rest is not None else Watts(math.nan),
        note="" if size is None else f"with {show_bytes(size)} of memory, as it was started",
    )
    device = Device(
        name=name,
        kind=DeviceKind(profile["kind"]),
        vendor=profile["vendor"],
        model=profile["model"],
        driver="emulated",
        driver_version=profile["name"],
        runtime_version=runtime_version(),
        # The provider that really runs the model, so that a model it cannot run is known to be unsupported.
        provider="CPUExecutionProvider",
        memory_bytes=pace.memory_bytes,
        memory_in="" if profile["memory_bytes"] else CPU,
        parallelism=profile["parallelism"],
        attributes={
            "native_provider": profile["native_provider"],
            "software": profile["software"],
            "licence": profile["licence"],
        },
        emulated=True,
        profile=profile["name"],
        profile_source=pace.source,
        time_scale=time_scale,
        rest=rest,
        links=tuple(DeviceLink(**each) for each in profile["links"]),
    )
    return _EmulatedDevice(device, pace)


def _sleep_profile(said: Mapping[str, Any] | None, wake_scale: float) -> Rest | None:
    if said is None:
        return None
    wake_s = Seconds(said["wake_s"] * wake_scale)
    scaled_number = "" if wake_scale == 1 else f"; here it wakes in {wake_scale:g} times that"
    return Rest(Watts(said["idle_w"]), Watts(said["asleep_w"]), wake_s, said["source"] + scaled_number)


def load_profile(name: str) -> Mapping[str, Any]:
    """As `agents/derive_profiles` wrote it. Raises ShoalError(FIELD_INVALID)."""
    if name not in profiles():
        raise refuse(Code.FIELD_INVALID, f"no profile {name!r:.80}", f"one of {', '.join(profiles())}", "see `devices`")
    found: Mapping[str, Any] = json.loads((_profiles_folder() / f"{name}.json").read_text())
    return found


def _profiles_folder() -> Any:
    return resources.files("shoal.agent.devices") / "profiles"
