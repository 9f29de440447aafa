"""A hostile netd or imaged: a report that contradicts the VM's record is refused."""

from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import record, uid

from virtbus.nodeagent.core.reported_status import contradiction
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.node_rpc import ImageReady, NetPhase, NetReady

MAC = "02:00:00:00:00:01"
RECORD = record(
    spec={"domain": {"devices": {"interfaces": [{"name": "net0", "mac_address": MAC}]}}}
)
GOOD = InterfaceStatus(name="net0", mac=MAC, addresses=("10.0.0.2/24", "fd00::2/64"))


def ready(*interfaces: InterfaceStatus, **more: Any) -> NetReady:
    values = {"uid": RECORD.uid, "epoch": 1, "phase": NetPhase.READY, "interfaces": interfaces}
    return NetReady.model_validate(values | more)


def test_a_report_that_matches_the_record_is_accepted() -> None:
    assert contradiction(RECORD, ready(GOOD)) == ""
    assert contradiction(RECORD, ImageReady(uid=RECORD.uid, epoch=1)) == ""


@pytest.mark.parametrize(
    "part",
    [
        ImageReady(uid=uid(2), epoch=1),
        ready(GOOD, uid=uid(2)),
        ready(),
        ready(GOOD, GOOD),
        ready(GOOD.model_copy(update={"name": "net1"})),
        ready(GOOD.model_copy(update={"mac": "02:00:00:00:00:02"})),
        ready(GOOD.model_copy(update={"mac": "x,script=/bin/sh"})),
        ready(GOOD.model_copy(update={"addresses": ("127.0.0.1/8",)})),
        ready(GOOD.model_copy(update={"addresses": ("::1/128",)})),
        ready(GOOD.model_copy(update={"addresses": ("0.0.0.0/0",)})),
        ready(GOOD.model_copy(update={"addresses": ("bus.example",)})),
    ],
)
def test_a_report_that_contradicts_the_record_is_refused(part: ImageReady | NetReady) -> None:
    assert contradiction(RECORD, part)
