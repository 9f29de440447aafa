"""Lets CNI plugins clean up after ended attachments, and removes their cached results."""

import asyncio
from collections.abc import Iterator
from typing import NoReturn

from virtbus.netd.attachments import Attachments
from virtbus.netd.core.attachment import Nic
from virtbus.netd.core.cni_verbs import CniPlace
from virtbus.netd.edge.cni import Cni

EVERY_S = 3600.0


class PluginSweep:
    """Runs GC for the conflists of network objects.

    A conflist of the node may have other users, such as a container runtime. GC would end the
    attachments of these users, so netd runs no GC for a conflist of the node.
    """

    def __init__(self, cni: Cni, attachments: Attachments) -> None:
        self._cni = cni
        self._attachments = attachments

    async def run(self) -> NoReturn:
        while True:
            await self.once()
            await asyncio.sleep(EVERY_S)

    async def once(self) -> None:
        self._cni.cache.prune(set(self._known()))
        own = {
            nic.cni.conflist["name"]: nic.cni.conflist
            for _, nic in self._nics()
            if nic.cni is not None and nic.target is not None and nic.target.spec.config is not None
        }
        for conflist in own.values():
            await self._cni.collect(conflist, self._known)

    def _known(self) -> Iterator[CniPlace]:
        for uid, nic in self._nics():
            if nic.cni is not None:
                yield CniPlace(nic.cni.conflist["name"], uid, nic.eth)

    def _nics(self) -> Iterator[tuple[str, Nic]]:
        for uid in self._attachments.resources():
            attachment, _ = self._attachments.look(uid)
            for nic in attachment.nics if attachment is not None else ():
                yield uid, nic
