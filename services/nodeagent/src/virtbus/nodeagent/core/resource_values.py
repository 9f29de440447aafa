"""Translates limits of a VM's host resources to libvirt's figures, and back."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.resources import (
    PERIOD_DEFAULT_US,
    QUOTA_MAX_US,
    SHARES_MAX,
    SHARES_MIN,
    Resources,
    ResourcesInForce,
)

SHARES, PERIOD, QUOTA = "cpu_shares", "global_period", "global_quota"
DEFAULT_SHARES, DEFAULT_WEIGHT = 1024, 100
WEIGHT_MIN, WEIGHT_MAX = 1, 10_000
UNLIMITED = -1
MIB_KIB = 1024
"""QEMU rounds a guest's memory to MiB, and its balloon moves pages."""

Figures = dict[str, int]
InForce = dict[str, int | str | None]
"""Some fields of `ResourcesInForce`."""


class ResourcesSet(NamedTuple):
    """The result of a change of a guest's limits."""

    in_force: ResourcesInForce | None
    """libvirt's new limits; None if no guest runs."""
    error: VirtbusError | None = None
    """The error of a limit that could not be set. Other limits may have been set."""


def first_to_repeat(errors: Sequence[VirtbusError]) -> VirtbusError | None:
    """Prefer an error that a repeat may avoid. Return None without errors."""
    return next((one for one in errors if one.code != Code.UNSUPPORTED), next(iter(errors), None))


def scheduler(wanted: Resources, *, unified: bool) -> Figures:
    """Return libvirt's scheduler parameters. `unified` is True if the host has cgroup v2."""
    default = DEFAULT_WEIGHT if unified else DEFAULT_SHARES
    shares = wanted.cpu_shares
    if shares is not None and unified:
        shares = weight(shares)
    return {
        SHARES: default if shares is None else shares,
        PERIOD: wanted.cpu_period_us,
        QUOTA: UNLIMITED if wanted.cpu_quota_us is None else wanted.cpu_quota_us,
    }


def weight(shares: int) -> int:
    """Return cgroup v2's weight for v1's shares, by Kubernetes' conversion."""
    span = SHARES_MAX - SHARES_MIN
    return WEIGHT_MIN + (shares - SHARES_MIN) * (WEIGHT_MAX - WEIGHT_MIN) // span


def _shares(value: int) -> int:
    span = WEIGHT_MAX - WEIGHT_MIN
    return SHARES_MIN + -(-(value - WEIGHT_MIN) * (SHARES_MAX - SHARES_MIN) // span)


def different(found: Mapping[str, int], wanted: Mapping[str, int]) -> list[Figures]:
    """Return the steps that set the wanted parameters.

    Each step sets one parameter, because libvirt applies parameters one by one.

    Lift the quota before a change of the period, because the kernel refuses some pairs of an old
    quota and a new period.
    """
    changed = {name: value for name, value in wanted.items() if _value(found, name) != value}
    steps: list[Figures] = []
    if PERIOD in changed and _value(found, QUOTA) != UNLIMITED:
        steps.append({QUOTA: UNLIMITED})
        changed[QUOTA] = wanted[QUOTA]
    steps += [{name: changed[name]} for name in (SHARES, PERIOD, QUOTA) if name in changed]
    return steps


def _value(found: Mapping[str, int], name: str) -> int | None:
    """Read an unlimited quota, which libvirt shows as -1 or as a huge number."""
    value = found.get(name)
    if name == QUOTA and value is not None and not 0 < value <= QUOTA_MAX_US:
        return UNLIMITED
    return value


def in_force(found: Mapping[str, int], wanted: Resources, *, unified: bool) -> InForce:
    """Return libvirt's present limits of CPU time.

    With cgroup v2, shares are converted from a weight, which rounds. If the weight equals that of
    the wanted shares, return the wanted shares.
    """
    figures = scheduler(wanted, unified=unified)
    shares: int | None = found.get(SHARES)
    if shares == figures[SHARES]:
        shares = wanted.cpu_shares
    elif shares is not None and unified:
        shares = _shares(shares)
    quota = _value(found, QUOTA)
    return {
        "cpu_shares": shares,
        "cpu_quota_us": None if quota == UNLIMITED else quota,
        "cpu_period_us": found.get(PERIOD) or PERIOD_DEFAULT_US,
    }


def balloon_kib(wanted_bytes: int | None, most_kib: int) -> int:
    """Return the memory that the balloon should leave to the guest.

    The result is `most_kib`, all memory, if `wanted_bytes` is None or less than 1 MiB below it.
    """
    if wanted_bytes is None:
        return most_kib
    target_kib = -(-wanted_bytes // 1024)
    return most_kib if most_kib - target_kib < MIB_KIB else target_kib


def near(actual_kib: int, target_kib: int) -> bool:
    """Return True if the sizes differ by less than a MiB."""
    return abs(actual_kib - target_kib) < MIB_KIB
