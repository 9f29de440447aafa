"""Lets CNI plugins remove what attachments left behind, and removes their cached results."""

import asyncio
from typing import Any, NoReturn

from virtbus.netd.attachments import Attachments
from virtbus.netd.core.cni_verbs import CniPlace
from virtbus.netd.edge.cni import Cni

EVERY_S = 3600.0


class PluginSweep:
    """Runs GC for the conflists of network objects.

    A conflist of the node may have other users, such as a runtime of containers. GC would end the
    attachments of these, because netd does not know them.
    """

    def __init__(self, cni: Cni, attachments: Attachments) -> None:
        self._cni = cni
        self._attachments = attachments

    async def run(self) -> NoReturn:
        """Sweep at the start, and each hour."""
        while True:
            await self.once()
            await asyncio.sleep(EVERY_S)

    async def once(self) -> None:
        """Sweep once. A plugin that fails is logged."""
        known: set[CniPlace] = set()
        own: dict[str, dict[str, Any]] = {}
        for uid in list(self._attachments.resources()):
            attachment, _ = self._attachments.look(uid)
            for nic in attachment.nics if attachment is not None else ():
                if nic.cni is None:
                    continue
                name = nic.cni.conflist["name"]
                known.add(CniPlace(name, uid, nic.eth))
                if nic.target is not None and nic.target.spec.config is not None:
                    own[name] = nic.cni.conflist
        self._cni.cache.prune(known)
        for name, conflist in own.items():
            await self._cni.collect(conflist, (one for one in known if one.network == name))
