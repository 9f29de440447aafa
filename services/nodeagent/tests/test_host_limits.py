"""The limits of a guest on its host, with a libvirt that has fewer abilities than a real one."""

from typing import Any

import libvirt
import pytest

from virtbus.nodeagent.core.resource_values import ResourcesSet
from virtbus.nodeagent.edge.libvirt_resources import set_resources
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.resources import NO_LIMITS, Resources, ResourcesInForce

ONLINE = [True, True, False, True]
"""The CPU 2 of the host is offline."""


class Refused(libvirt.libvirtError):
    """libvirt refuses a call."""

    def __init__(self, number: int) -> None:
        super().__init__("refused")
        self.err = (number, libvirt.VIR_FROM_QEMU, "no cgroup", 2, None, None, None, -1, -1)


class Guest:
    """A running domain with one vCPU and two IO threads."""

    def __init__(self) -> None:
        self.masks = dict.fromkeys(("vcpu 0", "emulator", "io 1", "io 2"), tuple(ONLINE))
        self.figures = {"cpu_shares": 100, "global_period": 100_000, "global_quota": -1}
        self.memory_kib = 2**20
        self.refused: dict[str, int] = {}
        """The error's number in libvirt, by the name of a call."""

    def isActive(self) -> bool:  # noqa: N802  libvirt's names
        return True

    def connect(self) -> "Guest":
        return self

    def getCPUMap(self) -> tuple[int, list[bool], int]:  # noqa: N802
        return len(ONLINE), ONLINE, sum(ONLINE)

    def _called(self, call: str) -> None:
        if call in self.refused:
            raise Refused(self.refused[call])

    def schedulerParametersFlags(self, _flags: int) -> dict[str, int]:  # noqa: N802
        self._called("read")
        return dict(self.figures)

    def setSchedulerParametersFlags(self, figures: dict[str, int], _flags: int) -> None:  # noqa: N802
        self._called("set")
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


LIMITS = Resources(cpu_quota_us=50_000, cpus="1", memory_bytes=2**29)


def tried(guest: Any, wanted: Resources) -> ResourcesSet:
    return set_resources(wanted, guest)


def limited(guest: Any, wanted: Resources) -> ResourcesInForce:
    found, error = tried(guest, wanted)
    if error is not None:
        raise error
    assert found is not None
    return found


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


def test_a_host_without_a_cgroup_gives_the_other_limits_and_says_so_once() -> None:
    guest = Guest()
    guest.refused["read"] = libvirt.VIR_ERR_OPERATION_INVALID
    found, error = tried(guest, LIMITS)
    assert found == ResourcesInForce(cpus="1", memory_bytes=2**29)
    assert error is not None
    assert (error.code, error.body.message) == (
        Code.UNSUPPORTED,
        "set the resources: no cgroup",
    )
    assert tried(guest, LIMITS.model_copy(update={"cpu_quota_us": None})).error is None
    assert tried(guest, NO_LIMITS) == (ResourcesInForce(), None)


def test_a_limit_that_fails_is_told_as_it_was_before_and_tried_again() -> None:
    guest = Guest()
    limited(guest, LIMITS)
    guest.refused["set"] = libvirt.VIR_ERR_OPERATION_FAILED
    wanted = Resources(cpu_quota_us=10_000, cpus="2", memory_bytes=2**28)
    found, error = tried(guest, wanted)
    assert found == ResourcesInForce(cpu_quota_us=50_000, cpus="1", memory_bytes=2**28)
    assert error is not None
    assert error.code == Code.CONFLICT, "a later try may succeed"


def test_a_lost_connection_is_no_refusal_of_a_limit() -> None:
    guest = Guest()
    guest.refused["read"] = libvirt.VIR_ERR_INVALID_CONN
    with pytest.raises(Refused):
        tried(guest, LIMITS)
