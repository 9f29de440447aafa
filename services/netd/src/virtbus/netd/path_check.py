"""Describes the network of one VM, and tests it, on request."""

from virtbus.netd.attachments import Attachments
from virtbus.netd.builder import HostPorts
from virtbus.netd.core.attachment import Attachment
from virtbus.netd.core.paths import RESTART, faults_of, paths_of, states_of
from virtbus.netd.edge.namespaces import in_thread
from virtbus.netd.orphan_audit import OrphanAudit
from virtbus.schemas.network_path import NetworkAsk, NetworkView, PathFault
from virtbus.schemas.node_rpc import NetPhase

_PLUGINS = "restore what the plugin made on the host, or create the VM again"


class PathCheck:
    """Reads the host on request, and changes nothing."""

    def __init__(self, doors: HostPorts, attachments: Attachments, audit: OrphanAudit) -> None:
        self._doors = doors
        self._attachments = attachments
        self._audit = audit

    async def view(self, want: NetworkAsk) -> NetworkView:
        bridge = self._doors.bridge
        attachment, ready = self._attachments.look(want.uid)
        if attachment is None or ready is None:
            return NetworkView(uid=want.uid, faults=() if want.check else None)
        runs = await in_thread(lambda: self._doors.emulators.running({want.uid}))
        view = NetworkView(
            uid=want.uid,
            netns=attachment.netns,
            state="ready" if ready.phase is NetPhase.READY else "failed",
            guest_runs=bool(runs),
            subnet=str(bridge.gateway.network),
            gateway=str(bridge.gateway.ip),
            zone=self._doors.resolver.domain,
            groups=tuple(group.name for group in self._doors.groups.of_vm(attachment)),
            interfaces=paths_of(
                attachment, self._bridges(attachment), self._doors.groups.of(attachment)
            ),
        )
        if not want.check:
            return view
        faults = await self._faults(attachment, runs=bool(runs))
        if ready.error is not None:
            faults.insert(0, PathFault(what=ready.error.message, next_step=RESTART))
        return view.model_copy(update={"faults": tuple(faults)})

    def _bridges(self, attachment: Attachment) -> dict[str, str]:
        """Return the host side of each interface, by interface name.

        Skip interfaces without a host side.
        """
        attachers = self._doors.attachers
        sides = {nic.name: attachers.host_side(nic) for nic in attachment.nics}
        return {name: side for name, side in sides.items() if side}

    async def _faults(self, attachment: Attachment, *, runs: bool) -> list[PathFault]:
        joined = attachment.joined
        found, held = await self._audit.of_vm(joined) if joined.nics else ([], set())
        stands = not joined.nics or self._doors.namespaces.exists(attachment.netns)
        faults = faults_of(attachment, found, mendable=stands or not runs)
        plugins = await self._of_plugins(joined) if stands else []
        return [*faults, *plugins, *states_of(attachment, held, runs=runs)]

    async def _of_plugins(self, attachment: Attachment) -> list[PathFault]:
        netns = self._doors.namespaces.path(attachment.netns)
        return [
            PathFault(interface=nic.name, what=what, next_step=_PLUGINS)
            for nic in attachment.nics
            if nic.cni is not None
            for what in await self._doors.cni.check(attachment.uid, nic, nic.cni, netns)
        ]
