"""The limits of a guest on its host, with a libvirt that has fewer abilities than a real one."""

from typing import Any

import libvirt
import pytest

from virtbus.nodeagent.edge.libvirt_resources import set_resources
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.resources import NO_LIMITS, Resources

ONLINE = [True, True, False, True]
"""The CPU 2 of the host is offline."""


class Guest:
    """A running domain with one vCPU and two IO threads."""

    def __init__(self) -> None:
        self.masks = dict.fromkeys(("vcpu 0", "emulator", "io 1", "io 2"), tuple(ONLINE))
        self.figures = {"cpu_shares": 100, "global_period": 100_000, "global_quota": -1}
        self.memory_kib = 2**20

    def isActive(self) -> bool:  # noqa: N802  libvirt's names
        return True

    def connect(self) -> "Guest":
        return self

    def getCPUMap(self) -> tuple[int, list[bool], int]:  # noqa: N802
        return len(ONLINE), ONLINE, sum(ONLINE)

    def schedulerParametersFlags(self, _flags: int) -> dict[str, int]:  # noqa: N802
        return dict(self.figures)

    def setSchedulerParametersFlags(self, figures: dict[str, int], _flags: int) -> None:  # noqa: N802
        self.figures |= figures

    def vcpuPinInfo(self, _flags: int) -> list[tuple[bool, ...]]:  # noqa: N802
        return [self.masks["vcpu 0"]]

    def emulatorPinInfo(self, _flags: int) -> tuple[bool, ...]:  # noqa: N802
        return self.masks["emulator"]

    def ioThreadInfo(self, _flags: int) -> list[tuple[int, list[bool]]]:  # noqa: N802
        return [(number, list(self.masks[f"io {number}"])) for number in (1, 2)]

    def pinVcpuFlags(self, vcpu: int, mask: tuple[bool, ...], _flags: int) -> None:  # noqa: N802
        self.masks[f"vcpu {vcpu}"] = mask

    def pinEmulator(self, mask: tuple[bool, ...], _flags: int) -> None:  # noqa: N802
        self.masks["emulator"] = mask

    def pinIOThread(self, number: int, mask: tuple[bool, ...], _flags: int) -> None:  # noqa: N802
        self.masks[f"io {number}"] = mask

    def info(self) -> tuple[int, int, int]:
        return libvirt.VIR_DOMAIN_RUNNING, 2**20, self.memory_kib

    def setMemoryFlags(self, kib: int, _flags: int) -> None:  # noqa: N802
        self.memory_kib = kib


def limited(guest: Any, wanted: Resources) -> Any:
    return set_resources(wanted, guest)


def test_all_threads_of_a_guest_are_on_its_cpus() -> None:
    guest = Guest()
    assert limited(guest, Resources(cpus="0,3")).cpus == "0,3"
    assert set(guest.masks.values()) == {(True, False, False, True)}
    guest.masks["io 2"] = tuple(ONLINE)
    assert limited(guest, Resources(cpus="0,3")).cpus == "0,3", "a thread of its own is pinned, too"
    assert set(guest.masks.values()) == {(True, False, False, True)}


def test_a_guest_without_pins_may_use_the_cpus_that_are_online() -> None:
    guest = Guest()
    limited(guest, Resources(cpus="1"))
    assert limited(guest, NO_LIMITS).cpus is None
    assert set(guest.masks.values()) == {tuple(ONLINE)}


def test_a_cpu_that_is_offline_is_refused() -> None:
    with pytest.raises(VirtbusError, match="no online CPU 2; give CPUs of 0-1,3"):
        limited(Guest(), Resources(cpus="1-2"))
