"""Handles `virtbus.api.v1.vm.{start,stop,restart,pause,unpause}`: changes the power state."""

from virtbus.bus.client.ports import Request
from virtbus.controller.core import mutations
from virtbus.controller.core.evacuation import up
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.edge.vm_api import VmApi
from virtbus.schemas.api import VmRef, VmRestart, VmStart, VmStop
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.vm_status import VmView
from virtbus.schemas.wire import validate


class VmPower:
    """The handlers of power changes. Each changes the VM's record; the VM's agent acts on it."""

    def __init__(self, vms: VmApi, fleet: Fleet) -> None:
        self._vms = vms
        self._fleet = fleet

    async def start(self, request: Request) -> VmView:
        want = validate(VmStart, request.data)
        return await self._vms.change(
            want, lambda r: mutations.started(r, up=self._up(r), paused=want.paused), request
        )

    async def stop(self, request: Request) -> VmView:
        want = validate(VmStop, request.data)
        return await self._vms.change(
            want, lambda r: mutations.powered(r, on=False, grace_s=want.grace_s), request
        )

    async def restart(self, request: Request) -> VmView:
        want = validate(VmRestart, request.data)
        return await self._vms.change(
            want, lambda r: mutations.restarted(r, up=self._up(r), grace_s=want.grace_s), request
        )

    async def pause(self, request: Request) -> VmView:
        return await self._set_paused(request, on=True)

    async def unpause(self, request: Request) -> VmView:
        return await self._set_paused(request, on=False)

    async def _set_paused(self, request: Request, *, on: bool) -> VmView:
        return await self._vms.change(
            validate(VmRef, request.data),
            lambda r: mutations.paused(r, up=self._up(r), on=on),
            request,
        )

    def _up(self, record: VmRecord) -> bool:
        return up(record, self._fleet.last_status(record))
