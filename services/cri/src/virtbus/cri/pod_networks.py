"""Makes the VMs of pods hold and release their networks.

For CRI, the network of a pod's VM is the pod's sandbox (ADR 0059).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from virtbus.cri.core.configs import SandboxConfig
from virtbus.cri.core.pod import Pod
from virtbus.cri.machine_changes import MachineChanges
from virtbus.cri.pods import Pods
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.network import NetworkState

log = logging.getLogger(__name__)

BUSY_S = 1.0
"""If a call holds the lock of a duty's pod, the duties are repeated after this delay."""


class PodNetworks:
    """The networks of this node's pods.

    A caller of `hold` or `release` must hold the pod's lock. `create` creates a VM without disks.
    """

    def __init__(
        self,
        pods: Pods,
        changes: MachineChanges,
        create: Callable[[str, SandboxConfig], Awaitable[None]],
    ) -> None:
        self._pods = pods
        self._changes = changes
        self._create = create

    async def hold(self, key: str, sandbox: SandboxConfig, timeout_s: float) -> None:
        """Make the node hold the pod's network, and wait until the network is ready.

        A pod without a VM gets a VM without disks, which holds the network.

        Raises:
            VirtbusError: 409 `vm_gone`. 500 `network_failed`. 503 `bus_away`. 504 `network_slow`.
                The errors of `vm.create`, `vm.get` and `vm.update`.
        """
        if not await self._set(key, NetworkState.HELD):
            await self._create(key, sandbox)
        await self._until(key, timeout_s)

    async def release(self, key: str) -> None:
        """Release the pod's network if no sandbox needs it. After an error, a duty releases it."""
        try:
            await self._release(key)
        except VirtbusError as error:
            log.info("the network stays for now: %s", error, extra={"code": "duty_waits"})
            self._pods.duties.set()

    async def _release(self, key: str) -> None:
        if key in self._pods.all and self._pods.all[key].holds_unused:
            await self._changes.power_off(key)
            await self._set(key, NetworkState.RELEASED)

    async def _set(self, key: str, state: NetworkState) -> bool:
        """Request that the node holds or releases the pod's network; return False without a VM.

        Raises:
            VirtbusError: 503 `bus_away`; the errors of `vm.get` and `vm.update`.
        """
        pod = self._pods.all.get(key)
        if pod is None or pod.machine is None:
            return False
        uid, known = pod.machine.uid, pod.machine.network
        try:
            view = await self._changes.view(uid)
        except VirtbusError as error:
            if error.code != Code.NOT_FOUND:
                raise
            await self._pods.lost(uid)
            return False
        if view.deleting:
            await self._pods.lost(uid)
            return False
        if view.spec.network_state is not state:
            spec = view.spec.model_copy(update={"network_state": state})
            view = await self._changes.update(view, spec, view.labels)
            known = ""
        if known != state:
            await self._pods.put(
                self._pods.all[key].with_machine(
                    network=str(state),
                    network_generation=view.generation,
                    network_reached=False,
                    network_error="",
                    addresses=(),
                )
            )
        await self._changes.answered(key, view)
        return True

    async def _until(self, key: str, timeout_s: float) -> None:
        """Wait until the pod's network has the requested state.

        Raises:
            VirtbusError: 409 `vm_gone`: the VM was deleted. 500 `network_failed`, with the node's
                text. 504 `network_slow`: the node has not finished in time.
        """

        def known(pod: Pod | None) -> bool:
            seen = pod.machine if pod is not None else None
            return seen is None or seen.network_reached or bool(seen.network_error)

        reached = await self._pods.until(key, known, timeout_s)
        pod = self._pods.all.get(key)
        machine = pod.machine if pod is not None else None
        if machine is None:
            raise VirtbusError(Code.CONFLICT, "vm_gone", "the pod's VM was deleted meanwhile")
        if machine.network_error:
            raise VirtbusError(Code.INTERNAL, "network_failed", machine.network_error)
        if not reached:
            message = (
                f"the node has not made the network after {timeout_s:.0f} s "
                f"({machine.message or 'no reason yet'}); `virtbus status` shows its services"
            )
            raise VirtbusError(Code.DEADLINE, "network_slow", message)

    # --- duties ---------------------------------------------------------------------------
    async def clear(self) -> None:
        """Drop pods without sandboxes, which a kill of this process may have left.

        A locked pod is skipped, because a call may just make its sandbox or release its network.
        After a skip, the duties are repeated after BUSY_S.
        """
        busy = False
        for key, pod in tuple(self._pods.all.items()):
            if pod.sandboxes and not pod.holds_unused:
                continue
            if self._pods.lock(key).locked():
                busy = True
            elif not pod.sandboxes:
                async with self._pods.lock(key):
                    await self._pods.drop(pod)
        if busy:
            asyncio.get_running_loop().call_later(BUSY_S, self._pods.duties.set)

    async def release_unused(self, key: str) -> None:
        """Release the pod's network if no sandbox needs it.

        Raises the errors of `vm.get`, `vm.stop` and `vm.update`.
        """
        pod = self._pods.all.get(key)
        if pod is not None and pod.holds_unused and not self._pods.lock(key).locked():
            async with self._pods.lock(key):
                await self._release(key)
