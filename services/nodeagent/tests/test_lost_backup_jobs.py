"""A backup job that libvirt has lost is reported as `backup_lost`, with the way out (ADR 0068)."""

from collections.abc import Callable
from typing import Any

import libvirt
import pytest

from virtbus.nodeagent.core.domain_xml import domain_name
from virtbus.nodeagent.edge.libvirt_backups import LibvirtBackups
from virtbus.schemas.errors import VirtbusError

UID = "00000000-0000-4000-8000-000000000001"


class Domain:
    """A domain whose job libvirt cannot describe."""

    def __init__(self, error: str) -> None:
        self._error = error

    def UUIDString(self) -> str:  # noqa: N802  libvirt's name
        return UID

    def name(self) -> str:
        return domain_name(UID)

    def isActive(self) -> bool:  # noqa: N802  libvirt's name
        return True

    def jobStats(self) -> Any:  # noqa: N802  libvirt's name
        raise libvirt.libvirtError(self._error)

    def lookupByUUIDString(self, _uid: str) -> "Domain":  # noqa: N802  libvirt's name
        return self


class Links:
    """Calls a domain directly."""

    def __init__(self, error: str) -> None:
        self._domain = Domain(error)

    async def run(self, work: Callable[[Any], Any], _doing: str, **_more: Any) -> Any:
        return work(self._domain)


async def test_a_job_without_data_is_a_lost_backup_and_other_errors_are_those_of_libvirt() -> None:
    links: Any = Links("internal error: backup job data missing")
    with pytest.raises(VirtbusError) as lost:
        await LibvirtBackups(links).abort(UID)
    assert (lost.value.reason, "restart libvirtd" in str(lost.value)) == ("backup_lost", True)
    links = Links("internal error: client socket is closed")
    with pytest.raises(libvirt.libvirtError):
        await LibvirtBackups(links).abort(UID)
