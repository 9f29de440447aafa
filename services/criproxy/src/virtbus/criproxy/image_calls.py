"""Passes the calls about one image to the runtime of the image."""

from virtbus.criproxy.core import routing
from virtbus.criproxy.core.entries import Wanted, selected
from virtbus.criproxy.core.routing import ImageAsked
from virtbus.criproxy.edge import messages
from virtbus.criproxy.edge.grpc_server import Call
from virtbus.criproxy.edge.runtime_client import CallFailedError
from virtbus.criproxy.owners import Owners
from virtbus.criproxy.runtimes import NO_ANSWER, NodeRuntime, Runtimes

IMAGES = "ListImages"


class ImageCalls:
    """The handlers of ImageStatus, PullImage and RemoveImage."""

    def __init__(self, runtimes: Runtimes, owners: Owners, vm_handlers: tuple[str, ...]) -> None:
        self._runtimes = runtimes
        self._owners = owners
        self._vm_handlers = vm_handlers

    async def status(self, call: Call) -> bytes:
        """Return the answer of the runtime that the call to ImageStatus determines.

        If the call determines no runtime, return the answer of a runtime that has the image.

        Raises:
            VirtbusError: 400: the request is unreadable.
            CallFailedError: the error of the runtime.
        """
        image, pod = messages.asked_image(call.name, call.body)
        name = routing.runtime_of_image(image, pod, None, self._vm_handlers)
        if name is not None:
            return await self._runtimes.named(name).passed(call)
        first, second = self._in_order(image)
        answer = await first.passed(call)
        if messages.has_image(answer):
            return answer
        try:
            other = await second.passed(call)
        except CallFailedError as error:
            if error.code in NO_ANSWER and not _holds(second, image):
                return answer  # the second runtime is away, and is not known to have the image
            raise
        return other if messages.has_image(other) else answer

    def _in_order(self, image: ImageAsked) -> tuple[NodeRuntime, NodeRuntime]:
        """Return both runtimes, the runtime of containers first.

        If only the runtime of VMs is known to have the image, the runtime of VMs is first.
        """
        containers, vms = self._runtimes
        only_vms = _holds(vms, image) and not _holds(containers, image)
        return (vms, containers) if only_vms else (containers, vms)

    async def pull(self, call: Call) -> bytes:
        """Pass PullImage to the runtime that its pod or image determines.

        If they determine none, pass the call to the runtime of containers.

        Raises:
            VirtbusError: 400 `image_of_other_runtime`, `request_unreadable`.
            CallFailedError: the error of the runtime.
        """
        image, pod = messages.asked_image(call.name, call.body)
        owner = self._owners.of_pod(pod.uid)
        name = routing.runtime_of_image(image, pod, owner, self._vm_handlers)
        return await self._runtimes.named(name or routing.CONTAINERS).passed(call)

    async def remove(self, call: Call) -> bytes:
        """Pass RemoveImage to the runtime that the call determines.

        If the call determines none, pass it to each runtime that has the image. If no runtime is
        known to have the image, pass the call to each runtime that is not away.

        Raises:
            VirtbusError: 400: the request is unreadable.
            CallFailedError: the error of a runtime.
        """
        image, pod = messages.asked_image(call.name, call.body)
        name = routing.runtime_of_image(image, pod, None, self._vm_handlers)
        if name is not None:
            return await self._runtimes.named(name).passed(call)
        holders = [one for one in self._runtimes if _holds(one, image)]
        answer = b""
        there = [one for one in self._runtimes if not one.away]
        for one in holders or there or self._runtimes:  # if all are away, the first call fails
            answer = await one.passed(call)
        return answer


def _holds(runtime: NodeRuntime, image: ImageAsked) -> bool:
    return bool(selected(runtime.entries(IMAGES).values(), Wanted(image.name)))
