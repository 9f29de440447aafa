"""Runs the CNI plugins of interfaces, and gives the plugins' addresses to the guests."""

import logging
from collections.abc import Callable, Iterable, Sequence

from virtbus.netd.core.address_assignment import network_mtu, no_link, refused_mac, replaced
from virtbus.netd.core.attachment import Attachment, CniState, Nic
from virtbus.netd.core.cni import at_network
from virtbus.netd.core.cni_results import given_mac, host_ends, repaired, settled
from virtbus.netd.core.masquerade import refuse_overlap
from virtbus.netd.edge.cni import Cni
from virtbus.netd.edge.host_links import appeared
from virtbus.netd.edge.namespaces import Namespaces, in_thread
from virtbus.netd.edge.plugin_links import PluginLinks, router_of
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

Keep = Callable[[Attachment], None]
"""Stores an attachment whenever more of it is known. DEL needs the last stored value."""


class PluginChains:
    """Runs the plugin chains of conflists, from files of the node or from network objects.

    All methods may be cancelled.
    """

    def __init__(self, namespaces: Namespaces, cni: Cni, nics: Callable[[], Iterable[Nic]]) -> None:
        """`nics` returns the interfaces of all VMs of this host."""
        self._namespaces = namespaces
        self._cni = cni
        self._nics = nics
        self._links = PluginLinks(namespaces)
        self.insistent: set[str] = set()
        """Networks whose plugins choose the MAC. A VM must be attached to them before its start."""

    async def add(
        self, attachment: Attachment, nics: Sequence[Nic], keep: Keep, before: frozenset[str]
    ) -> Attachment:
        """Run ADD of the chains of `nics`. After a failure, run DEL of these chains.

        `before` has the links of the host before the first plugin runs.

        Raises:
            VirtbusError: the first failure; its message names links that plugins left on the host.
                409 `cni_mac`: plugins chose another MAC, and `insistent` lacked their network. If
                DEL succeeded, the last value of `keep` has no conflists of `nics`.
        """
        latest = attachment

        def kept(more: Attachment) -> None:
            nonlocal latest
            latest = more
            keep(more)

        try:
            for nic in nics:
                if nic.cni is not None:
                    attachment = await self._add(attachment, nic, nic.cni, kept)
        except VirtbusError as error:
            own = [each.index for each in nics]
            begun = latest.with_nics(each for each in latest.nics if each.index in own)
            await self._undo(latest, begun, keep)
            known = before | host_ends(each for each in self._nics() if each not in begun.nics)
            netns = self._namespaces.path(attachment.netns)
            left = await in_thread(lambda: appeared(known, netns))
            raise _with_links(error, left) from error
        return attachment

    async def _undo(self, latest: Attachment, begun: Attachment, keep: Keep) -> None:
        failed = await self.delete(begun)
        if failed is not None:
            extra = {"code": "unmake_failed", "uid": latest.uid}
            log.warning("the release will remove the rest: %s", failed, extra=extra)
            return
        for nic in begun.nics:
            latest = replaced(latest, nic.model_copy(update={"cni": None}))
        keep(latest)

    async def _add(
        self, attachment: Attachment, nic: Nic, state: CniState, keep: Keep
    ) -> Attachment:
        try:
            return await self._added(attachment, nic, state, keep)
        except VirtbusError as error:
            raise at_network(error, nic) from error

    async def _added(
        self, attachment: Attachment, nic: Nic, state: CniState, keep: Keep
    ) -> Attachment:
        netns = self._namespaces.path(attachment.netns)
        done = await self._cni.add(attachment.uid, nic, state, netns)
        nic = nic.model_copy(update={"cni": done})
        link = await in_thread(lambda: self._links.find(attachment, nic))
        result, repairs = repaired(done.result or {}, nic.eth, link)
        if repairs:
            extra = {"code": "cni_completed", "uid": attachment.uid, "repairs": ",".join(repairs)}
            log.info("the result of the plugins of %s was completed", nic.network, extra=extra)
        try:
            nic = settled(nic, result)
            if nic.gateway6:
                router6 = await in_thread(lambda: router_of(nic.gateway6))
                nic = nic.model_copy(update={"router6": router6})
        finally:
            # DEL needs the result: plugins find their rules by the address, and the link loses the
            # address.
            attachment = replaced(attachment, nic)
            keep(attachment)
        if link is None:
            raise no_link(nic)
        await in_thread(lambda: self._links.take_addresses_off(attachment, nic, link))
        refuse_overlap(nic)
        mac = given_mac(result, nic) or link.mac
        if mac != nic.mac and nic.network not in self.insistent:
            self.insistent.add(nic.network)
            raise refused_mac(nic, mac)
        update = {
            "mac": mac,
            "mtu": network_mtu(nic, link.mtu),
            "on_macvlan": link.kind == "macvlan",
            "off_host": not link.to_host,
        }
        return replaced(attachment, nic.model_copy(update=update))

    async def delete(self, attachment: Attachment) -> VirtbusError | None:
        """Run DEL of all chains; return the first failure."""
        if not any(nic.cni is not None for nic in attachment.nics):
            return None
        await in_thread(lambda: self._links.give_addresses_back(attachment))
        netns = self._namespaces.path(attachment.netns)
        failed: VirtbusError | None = None
        for nic in reversed(attachment.nics):
            if nic.cni is None:
                continue
            try:
                await self._cni.delete(attachment.uid, nic, nic.cni, netns)
            except VirtbusError as error:
                failed = failed or at_network(error, nic)
        return failed


def _with_links(error: VirtbusError, left: Sequence[str]) -> VirtbusError:
    if not left:
        return error
    body = error.body
    names = ", ".join(left)
    message = (
        f"{body.message}; the plugins left links on this host: {names}; remove them: ip link delete"
    )
    return VirtbusError.of(body.model_copy(update={"message": message}))
