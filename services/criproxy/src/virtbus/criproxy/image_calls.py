"""Passes the calls about one image to its runtime."""

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
        """Answer ImageStatus by the runtime that the call decides, otherwise by one with the image.

        Raises:
            VirtbusError: 400 the request is unreadable.
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
                return answer  # the second is away, and is not known to have it
            raise
        return other if messages.has_image(other) else answer

    def _in_order(self, image: ImageAsked) -> tuple[NodeRuntime, NodeRuntime]:
        """Return both runtimes: first that of VMs if only it is known to have the image."""
        containers, vms = self._runtimes
        only_vms = _holds(vms, image) and not _holds(containers, image)
        return (vms, containers) if only_vms else (containers, vms)

    async def pull(self, call: Call) -> bytes:
        """Pass PullImage to the runtime that its pod or image decides, or to that of containers.

        Raises:
            VirtbusError: 400 `image_of_other_runtime`, or the request is unreadable.
            CallFailedError: the error of the runtime.
        """
        image, pod = messages.asked_image(call.name, call.body)
        owner = self._owners.of_pod(pod.uid)
        name = routing.runtime_of_image(image, pod, owner, self._vm_handlers)
        return await self._runtimes.named(name or routing.CONTAINERS).passed(call)

    async def remove(self, call: Call) -> bytes:
        """Pass RemoveImage to the runtime that the call decides, or to each that has the image.

        If none is known to have the image, each runtime that is not away gets the call.

        Raises:
            VirtbusError: 400 the request is unreadable.
            CallFailedError: the error of a runtime.
        """
        image, pod = messages.asked_image(call.name, call.body)
        name = routing.runtime_of_image(image, pod, None, self._vm_handlers)
        if name is not None:
            return await self._runtimes.named(name).passed(call)
        holders = [one for one in self._runtimes if _holds(one, image)]
        answer = b""
        there = [one for one in self._runtimes if not one.away]
        for one in holders or there or self._runtimes:  # if all are away, the first one's error
            answer = await one.passed(call)
        return answer


def _holds(runtime: NodeRuntime, image: ImageAsked) -> bool:
    return bool(selected(runtime.entries(IMAGES).values(), Wanted(image.name)))
