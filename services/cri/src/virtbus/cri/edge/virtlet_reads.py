"""Reads the ConfigMaps and Secrets that the annotations of Virtlet's pods name."""

from virtbus.cri.core import virtlet, virtlet_sources
from virtbus.cri.core.configs import SandboxConfig
from virtbus.cri.core.virtlet_sources import Contents
from virtbus.cri.edge.cluster import Cluster
from virtbus.schemas.errors import Code, VirtbusError


class VirtletReads:
    """Reads the objects. Without a cluster, refuses each pod whose annotations name objects."""

    def __init__(self, cluster: Cluster | None) -> None:
        self._cluster = cluster

    def check(self, sandbox: SandboxConfig) -> None:
        """Refuse a pod whose annotations name an object that no cluster can provide.

        Raises:
            VirtbusError: 422 `cluster_unread`.
        """
        named = virtlet.named_sources(sandbox.annotations)
        if named and self._cluster is None:
            message = (
                f"{min(named)} needs a ConfigMap or Secret, and this node's runtime reads none; "
                "set kubeconfig in /etc/virtbus/cri.toml, or put the content into the manifest"
            )
            raise VirtbusError(Code.UNSUPPORTED, "cluster_unread", message)

    async def contents(self, sandbox: SandboxConfig) -> Contents:
        """Return the values of all objects that the annotations name.

        Raises:
            VirtbusError: 400 `source_missing`: an object does not exist. 400 `source_invalid`: a
                value of an object cannot be decoded. 422 `cluster_unread`. The errors of
                `Cluster.get`.
        """
        self.check(sandbox)
        found = {}
        for note, source in virtlet.named_sources(sandbox.annotations).items():
            assert self._cluster is not None, "`check` has refused the pod"  # noqa: S101
            path = source.path(sandbox.metadata.namespace)
            obj = await self._cluster.get(path)
            where = f"{note}: {source.kind}/{source.name} of {sandbox.metadata.namespace}"
            if obj is None:
                message = f"{where} does not exist; make it, or change the annotation"
                raise VirtbusError(Code.INVALID, "source_missing", message)
            try:
                found[note] = virtlet_sources.values(source.kind, obj)
            except ValueError as error:
                raise VirtbusError(
                    Code.INVALID, "source_invalid", f"{where} is unreadable: {error}"
                ) from None
        return found
