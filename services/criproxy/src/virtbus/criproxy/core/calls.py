"""Lists the calls of CRI in tables, by their treatment. Every other call is refused.

A call that is not in these tables is newer than this proxy. If such a call went to only one
runtime, its answer would lack the pods of the other runtime. So the proxy answers UNIMPLEMENTED,
and kubelet uses the older calls.
"""

from typing import Literal, NamedTuple

RUNTIME, IMAGES = "RuntimeService", "ImageService"
Of = Literal["sandbox", "container"]
"""The kind of object that a call identifies by its id."""
Effect = Literal["", "changes", "adds", "removes"]
"""The effect of a call on the lists of the runtime that gets the call."""


class ById(NamedTuple):
    """A call about one sandbox or container: the request's field with the id, and the effect."""

    of: Of
    field: str
    effect: Effect = ""


_OF_SANDBOX: tuple[Of, str] = ("sandbox", "pod_sandbox_id")
_OF_CONTAINER: tuple[Of, str] = ("container", "container_id")

BY_ID: dict[str, ById] = {
    "StopPodSandbox": ById(*_OF_SANDBOX, "changes"),
    "RemovePodSandbox": ById(*_OF_SANDBOX, "removes"),
    "PodSandboxStatus": ById(*_OF_SANDBOX),
    "PodSandboxStats": ById(*_OF_SANDBOX),
    "UpdatePodSandboxResources": ById(*_OF_SANDBOX),
    "PortForward": ById(*_OF_SANDBOX),
    "CreateContainer": ById(*_OF_SANDBOX, "adds"),
    "StartContainer": ById(*_OF_CONTAINER, "changes"),
    "StopContainer": ById(*_OF_CONTAINER, "changes"),
    "RemoveContainer": ById(*_OF_CONTAINER, "removes"),
    "ContainerStatus": ById(*_OF_CONTAINER),
    "ContainerStats": ById(*_OF_CONTAINER),
    "UpdateContainerResources": ById(*_OF_CONTAINER, "changes"),
    "ReopenContainerLog": ById(*_OF_CONTAINER),
    "ExecSync": ById(*_OF_CONTAINER),
    "Exec": ById(*_OF_CONTAINER),
    "Attach": ById(*_OF_CONTAINER),
    "CheckpointContainer": ById(*_OF_CONTAINER),
}
"""Calls that go to the runtime that has the sandbox or container."""

STATUS: dict[Of, str] = {"sandbox": "PodSandboxStatus", "container": "ContainerStatus"}
"""The status call of each kind. Its last answer is served while the runtime is away."""
LIST: dict[Of, str] = {"sandbox": "ListPodSandbox", "container": "ListContainers"}
"""The list call of each kind. Its answers show which runtime has an id."""

LISTS: dict[str, str] = {
    "ListPodSandbox": RUNTIME,
    "ListContainers": RUNTIME,
    "ListContainerStats": RUNTIME,
    "ListPodSandboxStats": RUNTIME,
    "ListMetricDescriptors": RUNTIME,
    "ListPodSandboxMetrics": RUNTIME,
    "ListImages": IMAGES,
}
"""The service of each list call. The proxy's answer joins the lists of both runtimes."""
STREAMS: dict[str, str] = {
    "StreamPodSandboxes": "ListPodSandbox",
    "StreamContainers": "ListContainers",
    "StreamContainerStats": "ListContainerStats",
    "StreamPodSandboxStats": "ListPodSandboxStats",
    "StreamPodSandboxMetrics": "ListPodSandboxMetrics",
    "StreamImages": "ListImages",
}
"""Maps each call that lists in parts to the older call that lists in one answer.

On the wire, requests and answers of both calls are encoded in the same way (ADR 0058).
"""
MEASURED = frozenset({"ListContainerStats", "ListPodSandboxStats", "ListPodSandboxMetrics"})
"""Lists with a time in each element: two such lists are never equal."""

FIRST = ("Version", "RuntimeConfig")
"""Calls that go to the runtime of containers. While that runtime is away, its last answers are
served."""
RUN, STATUS_OF_ALL, UPDATE_ALL = "RunPodSandbox", "Status", "UpdateRuntimeConfig"
EVENTS = "GetContainerEvents"
IMAGE_STATUS, PULL, REMOVE_IMAGE = "ImageStatus", "PullImage", "RemoveImage"
FILESYSTEMS = "ImageFsInfo"


PATHS = {
    name: f"/runtime.v1.{service}/{name}"
    for service, names in (
        (RUNTIME, (*BY_ID, *FIRST, RUN, STATUS_OF_ALL, UPDATE_ALL, EVENTS)),
        (IMAGES, (IMAGE_STATUS, PULL, REMOVE_IMAGE, FILESYSTEMS)),
        *((service, (name,)) for name, service in LISTS.items()),
        *((LISTS[of], (name,)) for name, of in STREAMS.items()),
    )
    for name in names
}
"""The paths of the calls in gRPC."""
