"""Implements CRI's calls about statistics from files of the node, without the bus."""

from collections.abc import Iterator
from pathlib import Path

from virtbus.cri.core import answers, metrics, stats
from virtbus.cri.core.answers import Plain
from virtbus.cri.core.pod import Container, Pod, Sandbox
from virtbus.cri.edge.guest_traffic import GuestTraffic, NicTraffic
from virtbus.cri.edge.guest_usage import GuestUsage
from virtbus.cri.pods import Pods, not_found


class Statistics:
    """CRI's calls about statistics. `disks` is the folder with the disks of all VMs."""

    def __init__(self, pods: Pods, usage: GuestUsage, traffic: GuestTraffic, disks: Path) -> None:
        self._pods = pods
        self._traffic = traffic
        self._usage = usage
        self._disks = disks

    def container(self, container_id: str) -> Plain:
        """Return the statistics of a container.

        Raises VirtbusError 404.
        """
        found = self._pods.find_container(container_id)
        if found is None:
            raise not_found("container", container_id)
        pod = self._pods.all[found[0]]
        return self._of_container(pod, pod.container(found[1]))

    def containers(self, wanted: Plain) -> list[Plain]:
        """Return the statistics of the active containers that match a `ContainerStatsFilter`."""
        chosen = {one.id for one in answers.containers(self._pods.all, wanted) if one.up}
        return [
            self._of_container(pod, one)
            for pod in self._pods.all.values()
            for one in pod.containers
            if one.id in chosen
        ]

    def sandbox(self, sandbox_id: str) -> Plain:
        """Return the statistics of a sandbox.

        Raises VirtbusError 404.
        """
        found = self._pods.find_sandbox(sandbox_id)
        if found is None:
            raise not_found("sandbox", sandbox_id)
        pod = self._pods.all[found[0]]
        return self._of_sandbox(pod, pod.sandbox(found[1]))

    def sandboxes(self, wanted: Plain) -> list[Plain]:
        """Return the statistics of the ready sandboxes that match a `PodSandboxStatsFilter`."""
        return [self._of_sandbox(pod, one) for pod, one in self._ready(wanted)]

    def _ready(self, wanted: Plain) -> Iterator[tuple[Pod, Sandbox]]:
        chosen = {one.id for one in answers.sandboxes(self._pods.all, wanted) if one.ready}
        for pod in self._pods.all.values():
            yield from ((pod, one) for one in pod.sandboxes if one.id in chosen)

    def metrics(self) -> list[Plain]:
        now_ns = self._pods.sources.time_ns()
        return [
            metrics.of_sandbox(self._of_sandbox(pod, one), self._nics(pod, one), now_ns=now_ns)
            for pod, one in self._ready({})
        ]

    def _of_container(self, pod: Pod, one: Container) -> Plain:
        now_ns = self._pods.sources.time_ns()
        if pod.machine is None:
            return stats.container(one, None, None, now_ns=now_ns)
        usage = self._usage.of(pod.machine.uid)
        cpu_ns, memory_bytes = (usage.cpu_ns, usage.memory_bytes) if one.up else (None, None)
        whole = stats.container(one, cpu_ns, memory_bytes, now_ns=now_ns)
        return stats.with_disk(whole, str(self._disks), usage.disk_bytes, now_ns=now_ns)

    def _of_sandbox(self, pod: Pod, one: Sandbox) -> Plain:
        inside = [each for each in pod.containers if each.sandbox_id == one.id and each.up]
        told = stats.sandbox(one, [self._of_container(pod, each) for each in inside])
        now_ns = self._pods.sources.time_ns()
        return stats.with_network(told, self._nics(pod, one), now_ns=now_ns)

    def _nics(self, pod: Pod, one: Sandbox) -> tuple[NicTraffic, ...]:
        """Return the counters of a sandbox's NICs; empty for a stopped sandbox."""
        if pod.machine is None or not one.ready:
            return ()
        return self._traffic.of(pod.machine.uid)
