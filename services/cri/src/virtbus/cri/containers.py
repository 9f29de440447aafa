"""Implements CRI's calls about containers. A container is one run of the guest of a pod's VM."""

from collections.abc import Callable
from typing import Protocol

from virtbus.cri.core import answers, pod_resources, vm_request
from virtbus.cri.core.answers import Plain
from virtbus.cri.core.configs import ContainerConfig, LinuxResources
from virtbus.cri.core.image_record import PulledImage
from virtbus.cri.core.pod import Container, Pod
from virtbus.cri.machines import Machines
from virtbus.cri.pods import Pods, not_found
from virtbus.schemas.errors import Code, VirtbusError

ID_BYTES = 32
START_S = 110.0
"""Maximum wait for a guest's start. kubelet's own limit is 120 s by default."""

RESIZE_S = 10.0
"""Maximum wait until a running guest has its new resources."""


class Logs(Protocol):
    """The log files of containers."""

    def path(self, pod: Pod, container: Container) -> str:
        """Return the absolute path of a container's log; empty if the container has no log."""

    def reopen(self, container: Container) -> None:
        """Close the log file, and open the file that now has its name.

        Raises VirtbusError 409 `not_running`, 503 `log_unwritable`.
        """


class Containers:
    """CRI's calls about containers.

    `image` finds a pulled image by its name or id, or raises VirtbusError 404.
    """

    def __init__(
        self, pods: Pods, machines: Machines, logs: Logs, image: Callable[[str], PulledImage]
    ) -> None:
        self._pods = pods
        self._machines = machines
        self._logs = logs
        self._image = image

    async def create(self, sandbox_id: str, config: ContainerConfig) -> str:
        """Make the pod's VM with its disks, but do not start it; return the container's id.

        A repeated call for the same attempt returns the same id.

        Raises:
            VirtbusError: 400 `pod_refused`, `second_container`. 404: the sandbox or the image is
                unknown. 409 `sandbox_not_ready`: the sandbox was stopped. 409 `still_running`: the
                guest of the previous attempt runs. 503 `volume_stuck`: a read of the pod's volumes
                does not return. The errors of `Machines.ensure` and `Machines.abandon`.
        """
        found = self._pods.find_sandbox(sandbox_id)
        if found is None:
            raise not_found("sandbox", sandbox_id)
        key, sandbox_id = found
        async with self._pods.lock(key):
            pod = self._pod(key, sandbox_id)
            namespace = pod.sandbox(sandbox_id).config.metadata.namespace
            config = await self._machines.volumes.inspected(key, namespace, config)
            pod = self._pod(key, sandbox_id)
            vm_request.check_container(config)
            vm_request.refuse_second(pod, config.metadata.name)
            known = _same(pod, sandbox_id, config)
            if known is not None:
                return known.id
            image = self._image(config.image.image)
            await self._end_former(pod)
            made_of = await self._machines.ensure(
                key, pod.sandbox(sandbox_id).config, config, image
            )
            sources = self._pods.sources
            container = Container(
                id=sources.secret(ID_BYTES).hex(),
                sandbox_id=sandbox_id,
                config=config.without_secrets(),
                image_id=made_of,
                created_ns=sources.time_ns(),
            )
            await self._pods.put(self._pods.all[key].with_container(container))
            return container.id

    def _pod(self, key: str, sandbox_id: str) -> Pod:
        """Return the pod of a ready sandbox.

        Raises VirtbusError: 404 for an unknown sandbox, 409 `sandbox_not_ready` for a stopped one.
        """
        pod = self._pods.all.get(key)
        if pod is None or all(one.id != sandbox_id for one in pod.sandboxes):
            raise not_found("sandbox", sandbox_id)
        if not pod.sandbox(sandbox_id).ready:
            message = f"the sandbox {sandbox_id} was stopped; run another one for the pod"
            raise VirtbusError(Code.CONFLICT, "sandbox_not_ready", message)
        return pod

    async def _end_former(self, pod: Pod) -> None:
        """End the previous attempt if the outcome of its start is unknown.

        Raises VirtbusError 409 `still_running` if the attempt's guest runs.
        """
        former = pod.active
        if former is None:
            return
        if former.phase == "running":
            raise _still_running(former)
        await self._machines.abandon(pod.key)

    async def start(self, container_id: str, left_s: float | None) -> None:
        """Start a container's guest, unless it runs, and wait until it runs.

        The pod is not locked during the wait, so another call may stop the container.

        Raises:
            VirtbusError: 404: the container or its sandbox is unknown. 409 `exited`: the container
                has ended. 409 `sandbox_not_ready`: its sandbox was stopped. 409 `still_running`:
                another container of the pod runs. The errors of `Machines.start` and
                `Machines.until_started`.
        """
        key, container_id = self._found(container_id)
        async with self._pods.lock(key):
            key, container_id = self._found(container_id)
            container = self._pods.all[key].container(container_id)
            if container.phase == "running":
                return
            if container.phase == "exited":
                message = f"the container {container_id} has ended; create its next attempt"
                raise VirtbusError(Code.CONFLICT, "exited", message)
            other = self._pod(key, container.sandbox_id).active
            if other is not None and other.id != container_id:
                raise _still_running(other)
            await self._machines.start(key, container_id)
        timeout_s = START_S if left_s is None else min(START_S, max(0.0, left_s - 1))
        await self._machines.until_started(key, container_id, timeout_s)

    async def update(self, container_id: str, change: LinuxResources, left_s: float | None) -> None:
        """Change the resources of a container, and wait until its node enforces the change.

        Raises:
            VirtbusError: 400 `pod_refused`. 404: the container is unknown. 409 `exited`: the
                container has ended. The errors of `Machines.resize` and
                `MachineChanges.until_resized`.
        """
        key, container_id = self._found(container_id)
        async with self._pods.lock(key):
            key, container_id = self._found(container_id)
            container = self._pods.all[key].container(container_id)
            if container.phase == "exited":
                message = f"the container {container_id} has ended; create its next attempt"
                raise VirtbusError(Code.CONFLICT, "exited", message)
            linux = container.config.linux
            after = pod_resources.changed(linux.resources, change)
            generation = await self._machines.resize(key, after)
            pod = self._pods.all[key]
            linux = linux.model_copy(update={"resources": after})
            config = container.config.model_copy(update={"linux": linux})
            container = pod.container(container_id).model_copy(update={"config": config})
            await self._pods.put(pod.with_container(container))
        timeout_s = RESIZE_S if left_s is None else min(RESIZE_S, max(0.0, left_s - 1))
        await self._machines.changes.until_resized(key, after, generation, timeout_s)

    async def stop(self, container_id: str, grace_s: int) -> None:
        """End a container's guest. No effect for an ended or unknown container."""
        found = self._pods.find_container(container_id)
        if found is None:
            return
        key, container_id = found
        async with self._pods.lock(key):
            await self._stop(key, container_id, grace_s)

    async def _stop(self, key: str, container_id: str, grace_s: int) -> None:
        pod = self._pods.all.get(key)
        if pod is not None and pod.active is not None and pod.active.id == container_id:
            await self._machines.stop(key, max(0, grace_s))

    async def remove(self, container_id: str) -> None:
        """End a container's guest and forget the container. The pod keeps the VM and its disks."""
        found = self._pods.find_container(container_id)
        if found is None:
            return
        key, container_id = found
        async with self._pods.lock(key):
            await self._stop(key, container_id, 0)
            pod = self._pods.all.get(key)
            if pod is not None:
                await self._pods.put(pod.without_container(container_id))

    def status(self, container_id: str, *, verbose: bool) -> tuple[Plain, Plain]:
        """Return a container's status and its `info`. Without `verbose`, the `info` is empty.

        Raises VirtbusError 404.
        """
        key, container_id = self._found(container_id)
        pod = self._pods.all[key]
        container = pod.container(container_id)
        told = answers.container_status(pod, container, self._logs.path(pod, container))
        return told, answers.machine_info(pod) if verbose else {}

    def listed(self, wanted: Plain) -> list[Plain]:
        return [answers.container_item(one) for one in answers.containers(self._pods.all, wanted)]

    def reopen(self, container_id: str) -> None:
        """Open a container's log file again. kubelet has renamed the old file to rotate the log.

        Raises VirtbusError 404, 409 `not_running`, 503 `log_unwritable`.
        """
        key, container_id = self._found(container_id)
        self._logs.reopen(self._pods.all[key].container(container_id))

    def _found(self, container_id: str) -> tuple[str, str]:
        found = self._pods.find_container(container_id)
        if found is None:
            raise not_found("container", container_id)
        return found


def _still_running(former: Container) -> VirtbusError:
    message = f"the container {former.id} still runs; stop it before the next attempt"
    return VirtbusError(Code.CONFLICT, "still_running", message)


def _same(pod: Pod, sandbox_id: str, config: ContainerConfig) -> Container | None:
    wanted = (sandbox_id, config.metadata)
    same = (one for one in pod.containers if (one.sandbox_id, one.config.metadata) == wanted)
    return next(same, None)
