"""Connects CRI's RuntimeService with sandboxes and containers."""

import json
from collections.abc import Mapping

from virtbus.cri.containers import Containers
from virtbus.cri.core import metrics
from virtbus.cri.core.answers import Plain
from virtbus.cri.core.configs import ContainerConfig, LinuxResources, SandboxConfig
from virtbus.cri.edge.grpc_server import Call, Handler, Offer
from virtbus.cri.node_state import NodeKeeper
from virtbus.cri.sandboxes import Sandboxes
from virtbus.cri.settings import Settings
from virtbus.cri.statistics import Statistics
from virtbus.cri.streaming import Streaming
from virtbus.schemas.version import VERSION
from virtbus.schemas.wire import validate

NAME = "virtbus"
CRI_VERSION = "v1"
KUBELET_VERSION = "0.1.0"
"""The version of kubelet's runtime API. No client reads it."""

SHOWN = {"node", "pod_network", "runtime_handlers", "cgroup_driver", "state_dir", "run_dir"}
"""The settings that a verbose status shows."""
REFUSED: Mapping[str, str] = {
    "CheckpointContainer": "a VM is no process tree that CRIU can write; snapshot its disks",
}
"""By refused call: the reason."""


class StatisticsCalls:
    """The handlers of RuntimeService about statistics."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {
            "ContainerStats": self._container,
            "ListContainerStats": self._containers,
            "PodSandboxStats": self._sandbox,
            "ListPodSandboxStats": self._sandboxes,
            "ListMetricDescriptors": self._descriptors,
            "ListPodSandboxMetrics": self._metrics,
        }

    async def _container(self, call: Call) -> Plain:
        return {"stats": self._statistics.container(call.request.get("container_id", ""))}

    async def _containers(self, call: Call) -> Plain:
        return {"stats": self._statistics.containers(call.request.get("filter", {}))}

    async def _sandbox(self, call: Call) -> Plain:
        return {"stats": self._statistics.sandbox(call.request.get("pod_sandbox_id", ""))}

    async def _sandboxes(self, call: Call) -> Plain:
        return {"stats": self._statistics.sandboxes(call.request.get("filter", {}))}

    async def _descriptors(self, _: Call) -> Plain:
        return {"descriptors": metrics.descriptors()}

    async def _metrics(self, _: Call) -> Plain:
        return {"pod_metrics": self._statistics.metrics()}


class StreamCalls:
    """The handlers of RuntimeService about sessions in guests."""

    def __init__(self, streaming: Streaming) -> None:
        self._streaming = streaming

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {
            "Attach": self._attach,
            "Exec": self._exec,
            "ExecSync": self._exec_sync,
            "PortForward": self._port_forward,
        }

    async def _attach(self, call: Call) -> Plain:
        return {"url": self._streaming.attach(call.request)}

    async def _exec(self, call: Call) -> Plain:
        return {"url": await self._streaming.exec(call.request, call.left_s)}

    async def _exec_sync(self, call: Call) -> Plain:
        done = await self._streaming.exec_sync(call.request)
        return {"stdout": done.stdout, "stderr": done.stderr, "exit_code": done.exit_code}

    async def _port_forward(self, call: Call) -> Plain:
        return {"url": self._streaming.port_forward(call.request)}


class RuntimeService:
    """The handlers of RuntimeService. `others` has those of StatisticsCalls and StreamCalls."""

    def __init__(
        self,
        sandboxes: Sandboxes,
        containers: Containers,
        others: Mapping[str, Handler],
        node: NodeKeeper,
        settings: Settings,
    ) -> None:
        self._sandboxes = sandboxes
        self._containers = containers
        self._others = others
        self._node = node
        self._settings = settings

    @property
    def offer(self) -> Offer:
        return Offer(
            {
                "Version": self._version,
                "Status": self._status,
                "RuntimeConfig": self._runtime_config,
                "UpdateRuntimeConfig": self._update_runtime_config,
                "RunPodSandbox": self._run_sandbox,
                "StopPodSandbox": self._stop_sandbox,
                "RemovePodSandbox": self._remove_sandbox,
                "PodSandboxStatus": self._sandbox_status,
                "ListPodSandbox": self._list_sandboxes,
                "UpdatePodSandboxResources": self._update_sandbox,
                "CreateContainer": self._create_container,
                "StartContainer": self._start_container,
                "StopContainer": self._stop_container,
                "RemoveContainer": self._remove_container,
                "ContainerStatus": self._container_status,
                "ListContainers": self._list_containers,
                "ReopenContainerLog": self._reopen_log,
                "UpdateContainerResources": self._update_resources,
                **self._others,
            },
            REFUSED,
        )

    # --- the runtime ----------------------------------------------------------------------
    async def _version(self, _: Call) -> Plain:
        return {
            "version": KUBELET_VERSION,
            "runtime_name": NAME,
            "runtime_version": VERSION,
            "runtime_api_version": CRI_VERSION,
        }

    async def _status(self, call: Call) -> Plain:
        handlers = [{"name": name} for name in ("", *self._settings.runtime_handlers)]
        told: Plain = {
            "status": {"conditions": self._node.conditions()},
            "runtime_handlers": handlers,
        }
        if call.request.get("verbose", False):
            config = self._settings.model_dump(mode="json", include=SHOWN)
            info = {"config": config, "vms_without_pod": self._sandboxes.unclaimed}
            told["info"] = {name: json.dumps(one, sort_keys=True) for name, one in info.items()}
        return told

    async def _runtime_config(self, _: Call) -> Plain:
        return {"linux": {"cgroup_driver": self._settings.cgroup_driver.upper()}}

    async def _update_runtime_config(self, _: Call) -> Plain:
        """Ignore the node's pod CIDR, because each network has its own subnet."""
        return {}

    # --- sandboxes ------------------------------------------------------------------------
    async def _run_sandbox(self, call: Call) -> Plain:
        config = validate(SandboxConfig, call.request.get("config", {}))
        handler = call.request.get("runtime_handler", "")
        return {"pod_sandbox_id": await self._sandboxes.run(config, handler, call.left_s)}

    async def _stop_sandbox(self, call: Call) -> Plain:
        await self._sandboxes.stop(call.request.get("pod_sandbox_id", ""))
        return {}

    async def _remove_sandbox(self, call: Call) -> Plain:
        await self._sandboxes.remove(call.request.get("pod_sandbox_id", ""))
        return {}

    async def _sandbox_status(self, call: Call) -> Plain:
        told, info = self._sandboxes.status(
            call.request.get("pod_sandbox_id", ""), verbose=call.request.get("verbose", False)
        )
        return {"status": told, "info": info}

    async def _list_sandboxes(self, call: Call) -> Plain:
        return {"items": self._sandboxes.listed(call.request.get("filter", {}))}

    async def _update_sandbox(self, call: Call) -> Plain:
        """Ignore the pod's resources, because the VM has the resources of its container."""
        self._sandboxes.status(call.request.get("pod_sandbox_id", ""), verbose=False)
        return {}

    # --- containers -----------------------------------------------------------------------
    async def _create_container(self, call: Call) -> Plain:
        config = validate(ContainerConfig, call.request.get("config", {}))
        container_id = await self._containers.create(call.request.get("pod_sandbox_id", ""), config)
        return {"container_id": container_id}

    async def _start_container(self, call: Call) -> Plain:
        await self._containers.start(call.request.get("container_id", ""), call.left_s)
        return {}

    async def _stop_container(self, call: Call) -> Plain:
        grace_s = int(call.request.get("timeout", 0))
        await self._containers.stop(call.request.get("container_id", ""), grace_s)
        return {}

    async def _remove_container(self, call: Call) -> Plain:
        await self._containers.remove(call.request.get("container_id", ""))
        return {}

    async def _container_status(self, call: Call) -> Plain:
        told, info = self._containers.status(
            call.request.get("container_id", ""), verbose=call.request.get("verbose", False)
        )
        return {"status": told, "info": info}

    async def _list_containers(self, call: Call) -> Plain:
        return {"containers": self._containers.listed(call.request.get("filter", {}))}

    async def _update_resources(self, call: Call) -> Plain:
        change = validate(LinuxResources, call.request.get("linux", {}))
        asked = call.request.get("container_id", "")
        await self._containers.update(asked, change, call.left_s)
        return {}

    async def _reopen_log(self, call: Call) -> Plain:
        self._containers.reopen(call.request.get("container_id", ""))
        return {}
