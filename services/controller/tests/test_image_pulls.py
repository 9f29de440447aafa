"""`image.pull` over the nodes' imaged, in virtual time."""

from typing import Any

from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World

from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError

IMAGE = {"digest": "sha256:" + 64 * "a", "format": "raw", "size_bytes": 1, "virtual_size_bytes": 1}


@played(nodes=2)
async def test_a_pull_that_a_node_has_not_finished_is_repeated_by_its_client(made: World) -> None:
    slow = True

    async def done(_request: Request) -> Any:
        return IMAGE

    async def late(_request: Request) -> Any:
        if slow:
            raise VirtbusError(Code.DEADLINE, "image_pulling", "repeat it", after_ms=100)
        return IMAGE

    endpoints = [
        Endpoint("one", subjects.rpc("n1", "imaged", "pull"), done),
        Endpoint("two", subjects.rpc("n2", "imaged", "pull"), late),
    ]
    async with made.host.serve(ServiceInfo("imaged", "1.0.0"), endpoints):
        refusal = await refused(made.ask("pull", "image", ref="tiny"))
        assert (refusal.reason, refusal.body.after_ms) == ("image_pulling", 100)
        slow = False
        assert set((await made.ask("pull", "image", ref="tiny"))["images"]) == {"n1", "n2"}
