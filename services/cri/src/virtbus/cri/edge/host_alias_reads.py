"""Reads the host aliases of pods from the API server."""

import logging

from virtbus.cri.core.configs import SandboxConfig
from virtbus.cri.core.pod_dns import FROM_API, SOURCE, of_pod
from virtbus.cri.edge.cluster import Cluster
from virtbus.schemas.dns import is_domain
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest_files import HostAlias
from virtbus.schemas.wire import reason_of

log = logging.getLogger(__name__)


class HostAliasReads:
    """Reads the aliases from the cluster. Without a cluster, no pod has host aliases."""

    def __init__(self, cluster: Cluster | None) -> None:
        self._cluster = cluster

    async def aliases(self, sandbox: SandboxConfig) -> tuple[HostAlias, ...]:
        """Return the host aliases of a sandbox's pod.

        The result is empty for a pod that is not from the API server, or that the API server does
        not know by this name and uid. The result is empty, too, if the login is wrong, or may not
        read the pod.

        Raises:
            VirtbusError: 400 `pod_refused`: the aliases are invalid, or too many. 503
                `cluster_away`.
        """
        about = sandbox.metadata
        ours = sandbox.annotations.get(SOURCE) == FROM_API and is_domain(about.name)
        if self._cluster is None or not ours:
            return ()
        try:
            pod = await self._cluster.get(f"/api/v1/namespaces/{about.namespace}/pods/{about.name}")
        except VirtbusError as error:
            if error.code == Code.UNAVAILABLE:
                raise
            log.warning("no host aliases: %s", error, extra={"code": error.reason})
            return ()
        if pod is None or (pod.get("metadata") or {}).get("uid") != about.uid:
            return ()
        try:
            return of_pod(pod)
        except ValueError as error:
            message = f"the hostAliases of the pod: {reason_of(error)}"
            raise VirtbusError(Code.INVALID, "pod_refused", message) from error
