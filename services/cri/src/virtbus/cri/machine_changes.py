"""Changes and deletes the records of pods' VMs: labels, limits of running guests, power."""

from typing import Any

from virtbus.cri.core import observation, pod_resources, virtlet
from virtbus.cri.core.configs import LinuxResources
from virtbus.cri.core.pod import Pod
from virtbus.cri.edge.bus_link import BusLink
from virtbus.cri.pods import Pods
from virtbus.schemas.api import VmDelete, VmRef, VmStop, VmUpdate
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.vm import VmSpec
from virtbus.schemas.vm_status import VmView
from virtbus.schemas.wire import validate


class MachineChanges:
    """Reads, changes and deletes VMs by requests to the bus."""

    def __init__(self, pods: Pods, link: BusLink) -> None:
        self._pods = pods
        self._link = link

    async def view(self, uid: str) -> VmView:
        """Return the current view of a VM.

        Raises the errors of `vm.get`.
        """
        return validate(VmView, await self._link.ask("vm", "get", VmRef(uid=uid)))

    async def update(self, view: VmView, spec: VmSpec, labels: dict[str, str]) -> VmView:
        want = VmUpdate(
            uid=view.uid,
            revision=view.revision,
            spec=None if spec == view.spec else spec,
            labels=None if labels == view.labels else labels,
        )
        return validate(VmView, await self._link.ask("vm", "update", want))

    async def resize(self, key: str, uid: str, after: LinuxResources) -> int:
        """Change the limits in the record of a pod's VM; return the generation of the record.

        Raises:
            VirtbusError: 422 `resize_unsupported`. 503 `bus_away`. The errors of `vm.get` and
                `vm.update`.
        """
        view = await self.view(uid)
        pod = self._pods.all[key]
        wanted = pod_resources.limits(after)
        notes = pod.sandboxes[-1].config.annotations
        fixed = virtlet.wishes(notes)[0].vcpus is not None
        pod_resources.check_running(after, view.spec.domain, fixed_cpus=fixed)
        domain = view.spec.domain.model_copy(update={"resources": wanted})
        if domain != view.spec.domain:
            spec = view.spec.model_copy(update={"domain": domain})
            view = await self.update(view, spec, view.labels)
        await self.answered(key, view)
        return view.generation

    async def until_resized(
        self, key: str, after: LinuxResources, generation: int, timeout_s: float
    ) -> None:
        """Wait until the node enforces a guest's limits. Return at once if the guest is off.

        Raises:
            VirtbusError: 503 `resize_waits`: the node does not enforce the limits in time.
        """
        wanted = pod_resources.limits(after)

        def done(pod: Pod | None) -> bool:
            if pod is None or pod.machine is None or pod.active is None:
                return True
            late = pod.machine.observed_generation < generation
            return not late and pod_resources.reached(wanted, pod.machine.resources)

        if not await self._pods.until(key, done, timeout_s):
            raise self._waits(key)

    def _waits(self, key: str) -> VirtbusError:
        machine = self._pods.all[key].machine
        why = machine.resources_wait if machine is not None else ""
        message = (
            f"the node has not set the resources yet: {why or 'its agent did not report them'}; "
            "kubelet repeats the resize"
        )
        return VirtbusError(Code.UNAVAILABLE, "resize_waits", message)

    async def read_again(self, key: str) -> None:
        """Read a pod's VM after the watch has shown an outdated view.

        Raises the errors of `vm.get`.
        """
        pod = self._pods.all.get(key)
        if pod is not None and pod.machine is not None:
            view = await self.view(pod.machine.uid)
            now_ns = self._pods.sources.time_ns()
            await self._pods.put(observation.read_again(self._pods.all[key], view, now_ns))

    async def answered(self, key: str, view: VmView) -> None:
        """Store the view that answers a request. From now on, older views are ignored."""
        pod = self._pods.all.get(key)
        if pod is None or pod.machine is None or pod.machine.uid != view.uid:
            return
        pod = pod.with_machine(revision=view.revision)
        await self._pods.put(observation.observed(pod, view, self._pods.sources.time_ns()))

    async def power_off(self, key: str) -> None:
        """Power off the record of a VM whose guest has ended.

        Raises the errors of `vm.stop`.
        """
        machine = self._pods.all[key].machine if key in self._pods.all else None
        if machine is None or not machine.power_off:
            return
        answer = await self._unless_gone("stop", VmStop(uid=machine.uid, grace_s=0))
        pod = self._pods.all[key].with_machine(power_off=False)
        await self._pods.put(pod)
        if answer is not None:
            await self.answered(key, validate(VmView, answer))

    async def delete(self, uid: str) -> None:
        """Delete a VM that no pod needs.

        Raises the errors of `vm.delete`.
        """
        await self._unless_gone("delete", VmDelete(uid=uid, grace_s=0))

    async def _unless_gone(self, verb: str, value: Any) -> Any:
        try:
            return await self._link.ask("vm", verb, value)
        except VirtbusError as error:
            if error.code in {Code.NOT_FOUND, Code.GONE} or error.reason == "deleting":
                return None
            raise
