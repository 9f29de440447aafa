"""Makes, starts and stops the VMs of pods, by requests to the bus.

Each request can be repeated, because the VM's uid is stored before the VM is created. If no call
waits for some work, this work is a duty (`duties.py`).
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from virtbus.cri.core import observation, pod_networks, stages, vm_request
from virtbus.cri.core.configs import ContainerConfig, LinuxResources, SandboxConfig
from virtbus.cri.core.image_record import PulledImage
from virtbus.cri.core.pod import Container, Ending, Pod, ShellKey
from virtbus.cri.core.vm_request import Place, Read
from virtbus.cri.edge.bus_link import BusLink
from virtbus.cri.edge.host_alias_reads import HostAliasReads
from virtbus.cri.edge.virtlet_reads import VirtletReads
from virtbus.cri.edge.volume_reads import VolumeReads
from virtbus.cri.machine_changes import MachineChanges
from virtbus.cri.pod_networks import PodNetworks
from virtbus.cri.pods import Pods
from virtbus.schemas.api import (
    VmCreate,
    VmCreated,
    VmStart,
    VmStop,
)
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.local_end import LocalEnded
from virtbus.schemas.vm_status import VmView
from virtbus.schemas.wire import validate

END_S = 30.0
"""Maximum time between the end of a guest's grace and the node's report of the guest's end."""
OF_THE_UID = frozenset({"uid_taken", "name_taken", "exists_unchanged"})
"""Refusals of a create that a repeat with the same uid would get again. Only after these refusals,
the pod gets a VM with another uid. After other refusals, the pod keeps the VM and its network."""


class PodReads(NamedTuple):
    """The readers of a pod's volumes, of objects in Virtlet's annotations, and of host aliases."""

    volumes: VolumeReads
    virtlet: VirtletReads
    aliases: HostAliasReads


class Machines:
    """The VMs of this node's pods."""

    def __init__(
        self,
        pods: Pods,
        link: BusLink,
        place: Callable[[], Place],
        new_key: Callable[[], ShellKey],
        end_here: Callable[[str, int], Awaitable[LocalEnded]],
        reads: PodReads,
    ) -> None:
        """`end_here` ends a guest without the bus, by uid and grace in seconds."""
        self._pods = pods
        self._link = link
        self._place = place
        self._new_key = new_key
        self._end_here = end_here
        self.volumes, self.virtlet, self._aliases = reads
        self.changes = MachineChanges(pods, link)
        self.networks = PodNetworks(pods, self.changes, self._create_bare)

    # --- create ---------------------------------------------------------------------------
    async def ensure(
        self, key: str, sandbox: SandboxConfig, config: ContainerConfig, image: PulledImage
    ) -> str:
        """Give the pod's VM its disks, or keep the disks of an earlier attempt. The VM stays off.

        Return the digest of the root disk's image. If the image in the manifest has changed, the
        pod gets another VM with a new root disk.

        Raises:
            VirtbusError: 400: the pod cannot be a VM. 503 `bus_away`. The errors of
                `VolumeReads.files`, `VirtletReads.contents`, `HostAliasReads.aliases`, `vm.get`,
                `vm.update` and `vm.create`.
        """
        machine = self._pods.all[key].machine
        if (
            machine is not None
            and vm_request.keeps_root(machine, config, image)
            and await self._adapt(key, sandbox, config)
        ):
            await self._pods.put(self._pods.all[key].with_machine(image_name=config.image.name))
            return machine.image_id
        contents = await self.virtlet.contents(sandbox)
        files = await self.volumes.files(key, config)
        hosts = await self.volumes.hosts(key, config)
        if not hosts.aliases:
            hosts = hosts._replace(aliases=await self._aliases.aliases(sandbox))
        read = Read(files, contents, hosts)
        pod = self._pods.all[key]
        machine = pod.machine
        if machine is None or machine.made:
            uid = self._pods.sources.uuid7()
            fresh = vm_request.new_machine(sandbox, uid, self._new_key())
            pod = pod.model_copy(update={"machine": fresh})
        pod = pod.with_machine(image_id=image.digest, image_name=config.image.name)
        request = vm_request.create_request(pod, sandbox, config, image, self._place(), read)
        if machine is not None and machine.made:
            await self._pods.discard(machine.uid)
        await self._pods.put(pod)
        await self._create(key, request, sandbox)
        return image.digest

    async def _create(self, key: str, request: VmCreate, sandbox: SandboxConfig) -> None:
        try:
            answer = await self._link.ask("vm", "create", request)
        except VirtbusError as error:
            if error.code == Code.GONE or error.reason in OF_THE_UID:
                await self._renew(key)
            raise pod_networks.explained(error, sandbox.annotations) from error
        await self.changes.answered(key, validate(VmCreated, answer).vm)

    async def _renew(self, key: str) -> None:
        """Drop a pod's VM, because the bus refuses the uid. The next attempt gets another uid."""
        pod = self._pods.all[key]
        if pod.machine is not None:
            await self._pods.discard(pod.machine.uid)
            await self._pods.put(pod.model_copy(update={"machine": None}))

    async def _create_bare(self, key: str, sandbox: SandboxConfig) -> None:
        """Create a VM that only holds the pod's network.

        Raises the errors of `vm.create`.
        """
        uid = self._pods.sources.uuid7()
        fresh = vm_request.new_machine(sandbox, uid, self._new_key())
        pod = self._pods.all.get(key, Pod(key=key)).model_copy(update={"machine": fresh})
        await self._pods.put(pod)
        await self._create(key, vm_request.sandbox_request(pod, sandbox, self._place()), sandbox)

    async def _adapt(self, key: str, sandbox: SandboxConfig, config: ContainerConfig) -> bool:
        """Give an existing VM the labels, resources and DNS settings of a new attempt.

        Return False if the VM is gone.
        """
        machine = self._pods.all[key].machine
        if machine is None:
            return False
        try:
            view = await self.changes.view(machine.uid)
            if view.deleting:
                await self._pods.lost(machine.uid)
                return False
            labels = vm_request.labels(sandbox, config)
            spec = vm_request.restarted(view.spec, sandbox, config)
            if view.labels != labels or view.spec != spec:
                view = await self.changes.update(view, spec, labels)
        except VirtbusError as error:
            if error.code != Code.NOT_FOUND:
                raise
            await self._pods.lost(machine.uid)
            return False
        await self.changes.answered(key, view)
        return True

    async def resize(self, key: str, after: LinuxResources) -> int:
        """Call `MachineChanges.resize` for a pod's VM.

        Raises VirtbusError 409 `vm_gone`, and the errors of `MachineChanges.resize`.
        """
        return await self.changes.resize(key, self._uid(key), after)

    # --- power ----------------------------------------------------------------------------
    async def start(self, key: str, container_id: str) -> None:
        """Request the start of a container's guest.

        Raises VirtbusError 409 `vm_gone`, and the errors of `vm.start`.
        """
        uid = self._uid(key)
        revision = await self._begin(key, container_id)
        try:
            answer = await self._link.ask("vm", "start", VmStart(uid=uid))
        except VirtbusError as error:
            if error.code == Code.NOT_FOUND:
                await self._pods.lost(uid)
            elif error.code not in {Code.DEADLINE, Code.INTERNAL}:  # the request had no effect
                await self._give_up(key, container_id, revision)
            raise
        await self.changes.answered(key, validate(VmView, answer))

    async def _begin(self, key: str, container_id: str) -> int:
        """Store that a container starts; return the revision of the VM before the start.

        A late view of this revision shows that the VM is off, and must not end the container. So
        the stored revision becomes one higher, and the view is ignored.
        """
        pod = self._pods.all[key]
        starting = pod.container(container_id).model_copy(update={"phase": "starting"})
        revision = pod.machine.revision if pod.machine else 0
        changed = pod.with_machine(power_off=False, revision=revision + 1)
        await self._pods.put(changed.with_container(starting))
        return revision

    async def until_started(self, key: str, container_id: str, timeout_s: float) -> None:
        """Wait until a container's guest runs.

        Raises:
            VirtbusError: 500 `start_failed`: the container has ended. 504 `start_slow`: the guest
                may still start.
        """
        if not await self._pods.until(
            key, lambda pod: _phase(pod, container_id) != "starting", timeout_s
        ):
            message = self._staged(key, f"the VM does not run after {timeout_s:.0f} s")
            raise VirtbusError(Code.DEADLINE, "start_slow", message)
        if _phase(self._pods.all.get(key), container_id) == "exited":
            message = _cause(self._pods.all.get(key), container_id)
            raise VirtbusError(Code.INTERNAL, "start_failed", message)

    def _staged(self, key: str, message: str) -> str:
        """Add the stage, state and text of the node's last report on the VM to a message."""
        pod = self._pods.all.get(key)
        if pod is None or pod.machine is None:
            return message
        seen = pod.machine
        message = f"{message} ({seen.state}: {seen.message or 'no reason yet'})"
        return stages.text(seen.stage, seen.reason or "start_slow", message)

    async def stop(self, key: str, grace_s: int) -> None:
        """End the active container's guest with the grace `grace_s`, and wait for the end.

        Raises:
            VirtbusError: 409 `vm_gone`. 504 `stop_slow`. The errors of `vm.stop` and of
                `LocalAgent.end`.
        """
        container = self._pods.all[key].active
        if container is None:
            return
        uid = self._uid(key)
        try:
            answer = await self._link.ask("vm", "stop", VmStop(uid=uid, grace_s=grace_s))
        except VirtbusError as error:
            # The bus may be away, or the controllers may hang or be unable to write. If the request
            # had effect, a second end of the guest is harmless.
            if error.code == Code.UNAVAILABLE or error.reason == "no_answer":
                await self._stop_here(key, container, uid, grace_s)
                return
            if error.code != Code.NOT_FOUND:
                raise
            await self._pods.lost(uid)
            return
        await self.changes.answered(key, validate(VmView, answer))
        if not await self._pods.until(key, lambda pod: not (pod and pod.active), grace_s + END_S):
            message = f"the guest still runs {END_S:.0f} s after its grace; `virtbus vm get {uid}`"
            raise VirtbusError(Code.DEADLINE, "stop_slow", message)

    async def _stop_here(self, key: str, container: Container, uid: str, grace_s: int) -> None:
        """Make the node's agent end the guest. A duty powers off the VM's record later."""
        done = await self._end_here(uid, grace_s)
        pod = self._pods.all.get(key)
        if pod is not None and pod.active is not None and pod.active.id == container.id:
            ending = observation.ending_by(container, done.last_exit, self._pods.sources.time_ns())
            await self._pods.put(observation.ended(pod, container, ending, off=True))

    async def abandon(self, key: str) -> None:
        """End the active container before the next attempt. The outcome of its start is unknown."""
        await self.stop(key, 0)
        container = self._pods.all[key].active
        if container is not None:
            now_ns = self._pods.sources.time_ns()
            message = "another attempt followed before the VM ran"
            end = Ending(
                finished_ns=now_ns,
                exit_code=observation.START_FAILED,
                reason="StartError",
                message=message,
            )
            await self._pods.put(observation.ended(self._pods.all[key], container, end, off=True))

    def _uid(self, key: str) -> str:
        machine = self._pods.all[key].machine
        if machine is None:
            message = "the pod's VM was deleted; create the container again"
            raise VirtbusError(Code.CONFLICT, "vm_gone", message)
        return machine.uid

    async def _give_up(self, key: str, container_id: str, revision: int) -> None:
        """Store that a start had no effect: restore the phase `created` and the VM's revision."""
        pod = self._pods.all[key]
        container = pod.container(container_id)
        if container.phase == "starting":
            created = container.model_copy(update={"phase": "created"})
            await self._pods.put(pod.with_container(created).with_machine(revision=revision))


def _phase(pod: Pod | None, container_id: str) -> str:
    found = [one.phase for one in pod.containers if one.id == container_id] if pod else []
    return found[0] if found else "exited"


def _cause(pod: Pod | None, container_id: str) -> str:
    endings = [one.ending for one in pod.containers if one.id == container_id] if pod else []
    return endings[0].message if endings and endings[0] else "the pod was removed"
