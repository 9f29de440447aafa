"""Implements CRI's calls about pod sandboxes. A sandbox is one attempt of a pod (ADR 0059)."""

from collections.abc import Mapping

from virtbus.cri.core import answers, vm_request
from virtbus.cri.core.answers import Plain
from virtbus.cri.core.configs import SandboxConfig
from virtbus.cri.core.pod import Pod, Sandbox, pod_key
from virtbus.cri.machines import Machines
from virtbus.cri.pods import Pods, not_found
from virtbus.schemas.errors import Code, VirtbusError

ID_BYTES = 32
NETWORK_S = 110.0
"""Maximum wait for a pod's network. kubelet's own limit is 4 minutes by default."""


class Sandboxes:
    """CRI's calls about sandboxes. `handlers` has the names of the served runtime handlers."""

    def __init__(self, pods: Pods, machines: Machines, handlers: tuple[str, ...]) -> None:
        self._pods = pods
        self._machines = machines
        self._handlers = handlers

    async def run(self, config: SandboxConfig, handler: str, left_s: float | None) -> str:
        """Make the network of a pod, and store the sandbox; return the sandbox's id.

        A repeated call for the same attempt returns the same id. A failed or cancelled call leaves
        no sandbox, and its network is released.

        Raises:
            VirtbusError: 400 `pod_refused`, `handler_unknown`. 409 `sandbox_stopped`: the sandbox
                of this attempt was stopped. 409 `sandbox_ready`: the pod has another ready sandbox.
                422 `cluster_unread`. The errors of `PodNetworks.hold`.
        """
        if handler and handler not in self._handlers:
            known = ", ".join(self._handlers)
            message = f"the runtime handler {handler!r:.80} is not served here, only: {known}"
            raise VirtbusError(Code.INVALID, "handler_unknown", message)
        vm_request.check_sandbox(config)
        self._machines.virtlet.check(config)
        key = pod_key(config.metadata)
        async with self._pods.lock(key):
            pod = self._pods.all.get(key, Pod(key=key))
            attempts = {one.config.metadata.attempt: one for one in pod.sandboxes}
            if config.metadata.attempt in attempts:
                return _again(attempts[config.metadata.attempt])
            for earlier in pod.sandboxes:
                _refuse_ready(earlier)
            timeout_s = NETWORK_S if left_s is None else min(NETWORK_S, max(0.0, left_s - 1))
            sources = self._pods.sources
            sandbox = Sandbox(
                id=sources.secret(ID_BYTES).hex(),
                config=config,
                runtime_handler=handler,
                created_ns=sources.time_ns(),
            )
            try:
                await self._machines.networks.hold(key, config, timeout_s)
                await self._pods.put(self._pods.all[key].with_sandbox(sandbox))
            except BaseException:
                await self._undo(key)
                raise
            return sandbox.id

    async def _undo(self, key: str) -> None:
        """Drop a pod without sandboxes. For any other pod, let a duty release the network."""
        pod = self._pods.all.get(key)
        if pod is not None and not pod.sandboxes:
            await self._pods.drop(pod)
        self._pods.duties.set()

    async def stop(self, sandbox_id: str) -> None:
        """End the sandbox's guest without a grace, and release the network.

        A repeated call has no effect.

        Raises:
            VirtbusError: the errors of `Machines.stop`, if the guest runs.
        """
        found = self._pods.find_sandbox(sandbox_id)
        if found is None:
            return
        key, sandbox_id = found
        async with self._pods.lock(key):
            await self._stop(key, sandbox_id)
            await self._machines.networks.release(key)

    async def _stop(self, key: str, sandbox_id: str) -> Pod | None:
        pod = self._pods.all.get(key)
        if pod is None or all(one.id != sandbox_id for one in pod.sandboxes):
            return None
        if pod.active is not None and pod.active.sandbox_id == sandbox_id:
            await self._machines.stop(key, 0)
        pod = self._pods.all[key]
        stopped = pod.sandbox(sandbox_id).model_copy(update={"ready": False})
        pod = pod.with_sandbox(stopped)
        await self._pods.put(pod)
        return pod

    async def remove(self, sandbox_id: str) -> None:
        """Remove a sandbox and its containers. With the pod's last sandbox, remove the VM, too."""
        found = self._pods.find_sandbox(sandbox_id)
        if found is None:
            return
        key, sandbox_id = found
        async with self._pods.lock(key):
            pod = await self._stop(key, sandbox_id)
            if pod is None:
                return
            pod = pod.without_sandbox(sandbox_id)
            if pod.sandboxes:
                await self._pods.put(pod)
                await self._machines.networks.release(key)
            else:
                await self._pods.drop(pod)

    def status(self, sandbox_id: str, *, verbose: bool) -> tuple[Plain, Plain]:
        """Return a sandbox's status and its `info`. Without `verbose`, the `info` is empty.

        Raises VirtbusError 404.
        """
        found = self._pods.find_sandbox(sandbox_id)
        if found is None:
            raise not_found("sandbox", sandbox_id)
        key, sandbox_id = found
        pod = self._pods.all[key]
        told = answers.sandbox_status(pod, pod.sandbox(sandbox_id))
        return told, answers.machine_info(pod) if verbose else {}

    @property
    def unclaimed(self) -> Mapping[str, str]:
        """Return the names of the VMs that belong to no pod, by uid."""
        return self._pods.unclaimed

    def listed(self, wanted: Plain) -> list[Plain]:
        return [answers.sandbox_item(one) for one in answers.sandboxes(self._pods.all, wanted)]


def _again(sandbox: Sandbox) -> str:
    if sandbox.ready:
        return sandbox.id
    message = f"this attempt has the stopped sandbox {sandbox.id}; run the next attempt"
    raise VirtbusError(Code.CONFLICT, "sandbox_stopped", message)


def _refuse_ready(sandbox: Sandbox) -> None:
    if sandbox.ready:
        message = f"the pod has the ready sandbox {sandbox.id}; stop it before the next attempt"
        raise VirtbusError(Code.CONFLICT, "sandbox_ready", message)
