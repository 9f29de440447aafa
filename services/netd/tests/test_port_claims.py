"""Claims of published ports while processes and the kernel refuse some."""

from typing import Any
from unittest.mock import MagicMock

import pytest
from services.netd.tests.pretended_host import make_record
from services.netd.tests.test_published import A, B

from virtbus.netd.core.attachment import Attachment
from virtbus.netd.core.plan import plan_of
from virtbus.netd.edge import published_ports
from virtbus.netd.edge.published_ports import PublishedPorts
from virtbus.schemas.errors import VirtbusError


def vm(uid: str, *host_ports: int) -> Attachment:
    """Return a network that publishes each port by an interface of its own."""
    nics = tuple({"publish": [{"host_port": port, "guest_port": 80}]} for port in host_ports)
    plan = plan_of(make_record(uid, networks=("default",) * len(nics), nics=nics))
    return plan.with_nics(
        nic.model_copy(update={"addresses": (f"10.127.0.{2 + nic.index}/16",)}) for nic in plan.nics
    )


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> PublishedPorts:
    made = PublishedPorts(MagicMock())
    monkeypatch.setattr(made, "_apply", MagicMock())
    monkeypatch.setattr(made, "_stands", lambda: True)
    monkeypatch.setattr(published_ports, "_end_connections", MagicMock())
    monkeypatch.setattr(published_ports, "_listening", lambda _: [])
    return made


def test_a_port_that_a_process_has_taken_later_keeps_no_other_interface_from_its_end(
    ports: PublishedPorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = vm(A, 8080, 8081)
    ports.claim(both)

    def taken(*_: Any) -> Any:
        return MagicMock(inode=0)

    monkeypatch.setattr(published_ports, "taken_by", taken)
    ports.claim(both.with_nics(both.nics[:1]))
    assert [lead.port.host_port for lead in ports._leads[A]] == [8080]
    with pytest.raises(VirtbusError, match="8081/tcp"):
        ports.claim(both)


def test_a_claim_that_the_kernel_refuses_leaves_the_ports_as_they_were(
    ports: PublishedPorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports.claim(vm(A, 8080))
    before = dict(ports._leads)
    with monkeypatch.context() as patch:
        patch.setattr(ports, "_apply", MagicMock(side_effect=OSError(22, "refused")))
        with pytest.raises(OSError, match="refused"):
            ports.claim(vm(B, 8081))
        with pytest.raises(OSError, match="refused"):
            ports.drop(A)
    assert ports._leads == before
    ports.drop(A)
    assert ports._leads == {}
