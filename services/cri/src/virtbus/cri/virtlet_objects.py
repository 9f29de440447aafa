"""Follows Virtlet's objects of the cluster: image translations for imaged, settings for this node.

The last known objects are stored, and apply while the API server is away.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from virtbus.bus.runtime.backoff import delays
from virtbus.cri.core import virtlet_objects
from virtbus.cri.core.virtlet_objects import ClusterObjects, NodeConfig
from virtbus.cri.core.vm_request import HOSTNAME
from virtbus.cri.edge.cluster import Cluster
from virtbus.cri.edge.image_names import write_names
from virtbus.cri.edge.store import RecordFolder
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

AGAIN_S = (1.0, 60.0)
KEY = "objects"
MOST_ERRORS = 5
_VIRTLETS = "/apis/virtlet.k8s/v1/namespaces/kube-system"
_NAMED = {"fieldSelector": f"metadata.name={virtlet_objects.TRANSLATIONS}"}
_LISTS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("image_mappings", f"{_VIRTLETS}/virtletimagemappings", {}),
    ("config_mappings", f"{_VIRTLETS}/virtletconfigmappings", {}),
    ("translations", "/api/v1/namespaces/kube-system/configmaps", _NAMED),
)
"""For each followed list: its field of `ClusterObjects`, its path in the API, and its query."""


class VirtletObjects:
    """The objects at the last read. Without a cluster, all lists of objects are empty."""

    def __init__(
        self,
        cluster: Cluster | None,
        folder: RecordFolder[ClusterObjects],
        names: Path,
        hostname: Callable[[], Awaitable[str]],
    ) -> None:
        """`names` is the folder of image names that imaged reads.

        `hostname` waits for the node's label `kubernetes.io/hostname`, and returns the label.
        """
        self._cluster = cluster
        self._folder = folder
        self._names = names
        self._hostname = hostname
        self._objects = ClusterObjects()
        self._files: Mapping[str, bytes] = {}
        self._writing = asyncio.Lock()
        self._unwritten = asyncio.Event()
        self.config = NodeConfig()

    async def load(self) -> None:
        """Read the last known objects from disk, before the first call."""
        if self._cluster is not None:
            self._objects = self._folder.load().get(KEY, self._objects)
        await self._publish()

    async def run(self) -> None:
        if self._cluster is None:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write_again())
            for field, path, query in _LISTS:
                group.create_task(self._follow(self._cluster, field, path, query))
            here = {"labelSelector": f"{HOSTNAME}={await self._hostname()}"}
            group.create_task(self._follow(self._cluster, "nodes", "/api/v1/nodes", here))

    async def _follow(
        self, cluster: Cluster, field: str, path: str, query: Mapping[str, str]
    ) -> None:
        pauses = delays(*AGAIN_S)
        while True:
            try:
                async for items in cluster.lists(path, query):
                    pauses = delays(*AGAIN_S)
                    if field == "nodes" and not items:
                        log.warning(
                            "no Kubernetes node has the label %s; VirtletConfigMappings for nodes "
                            "do not apply, and while there are any, rawDevices permit nothing",
                            query["labelSelector"], extra={"code": "node_unknown"},
                        )  # fmt: skip
                    await self._saw(field, [virtlet_objects.bare(item) for item in items])
            except VirtbusError as error:
                log.warning("%s: %s", path, error, extra={"code": error.reason})
            await asyncio.sleep(next(pauses))

    async def _saw(self, field: str, items: list[dict[str, Any]]) -> None:
        if getattr(self._objects, field) != items:
            self._objects = self._objects.model_copy(update={field: items})
            await self._publish()
            await self._folder.put(KEY, self._objects)

    async def _publish(self) -> None:
        self.config, problems = virtlet_objects.node_config(self._objects)
        regexps = self.config.regexps is not False
        self._files, unusable = virtlet_objects.image_files(self._objects, regexps=regexps)
        for one in (*problems, *unusable):
            log.error("%s: %s", one.path, one.message, extra={"code": "virtlet_config_invalid"})
        await self._write()

    async def _write(self) -> None:
        """Write the image names. After an error, `_write_again` repeats the write."""
        async with self._writing:
            try:
                errors = await write_names(self._names, self._files)
            except OSError as error:
                errors = [error]
        if errors and self._cluster is not None:
            for one in errors[:MOST_ERRORS]:
                log.error("%s: %s", self._names, one, extra={"code": "image_names_unwritable"})
            self._unwritten.set()
        else:
            self._unwritten.clear()

    async def _write_again(self) -> None:
        pauses = delays(*AGAIN_S)
        while True:
            await self._unwritten.wait()
            await asyncio.sleep(next(pauses))
            await self._write()
            if not self._unwritten.is_set():
                pauses = delays(*AGAIN_S)
