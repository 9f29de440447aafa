"""Defines the limits of a running VM on its host's CPUs and memory: as requested, and in force."""

import re
from typing import Annotated

from pydantic import Field, StringConstraints, field_validator

from virtbus.schemas.model import LenientModel, StrictModel
from virtbus.schemas.quantity import Bytes, Count

SHARES_MIN, SHARES_MAX = 2, 262_144
PERIOD_MIN_US, PERIOD_MAX_US = 1000, 1_000_000
PERIOD_DEFAULT_US = 100_000
QUOTA_MIN_US, QUOTA_MAX_US = 1000, 17_592_186_044_415
CPU_MAX = 4095
"""The highest number that a CPU of a host may have."""
_RANGE = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?")
"""The pattern is needed because `int` also accepts spaces, signs and digits of other scripts."""


def cpu_numbers(text: str) -> frozenset[int]:
    """Return the CPUs of a list such as `0-3,8`, as Linux writes it; none for an empty text.

    Raises:
        ValueError: a part is no number and no ascending range, or a number exceeds CPU_MAX.
    """
    found: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        low, high = (int(first), int(last or first)) if _RANGE.fullmatch(part) else (0, -1)
        if not low <= high <= CPU_MAX:
            msg = f"{part!r} is no range of CPUs from 0 to {CPU_MAX}"
            raise ValueError(msg)
        found.update(range(low, high + 1))
    return frozenset(found)


def cpu_list(numbers: frozenset[int]) -> str:
    """Return the shortest list of CPUs, as Linux writes it."""
    starts = sorted(one for one in numbers if one - 1 not in numbers)
    ends = sorted(one for one in numbers if one + 1 not in numbers)
    pairs = zip(starts, ends, strict=True)
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in pairs)


class Resources(StrictModel):
    """Limits of a VM on its host. All can change while the guest runs. None means no limit."""

    cpu_shares: Count | None = Field(None, ge=SHARES_MIN, le=SHARES_MAX)
    """The weight against other VMs when CPUs are short, in the units of cgroup v1."""
    cpu_quota_us: Count | None = Field(None, ge=QUOTA_MIN_US, le=QUOTA_MAX_US)
    """CPU time of the whole VM, with its emulator, in each period."""
    cpu_period_us: Count = Field(PERIOD_DEFAULT_US, ge=PERIOD_MIN_US, le=PERIOD_MAX_US)
    cpus: Annotated[str, StringConstraints(max_length=1024, pattern=r"^[0-9,-]+$")] | None = None
    """The host's CPUs that the VM may use, such as `0-3,8`."""
    memory_bytes: Bytes | None = Field(None, ge=1)
    """The memory that the guest keeps. Its balloon gives the rest of its memory to the host."""

    @field_validator("cpus")
    @classmethod
    def _numbers(cls, text: str | None) -> str | None:
        if text is None:
            return None
        try:
            return cpu_list(cpu_numbers(text))
        except ValueError as error:
            msg = f"must be a list of CPUs such as 0-3,8 ({error})"
            raise ValueError(msg) from None


NO_LIMITS = Resources.model_construct()


class ResourcesInForce(LenientModel):
    """The limits that the host enforces, as libvirt and the guest's balloon report them.

    A value that libvirt rounds is shown as it was requested.
    """

    cpu_shares: int | None = None
    cpu_quota_us: int | None = None
    cpu_period_us: int = PERIOD_DEFAULT_US
    cpus: str | None = None
    memory_bytes: int | None = None
