"""Finds the runtime of a sandbox, a container or a pod.

Each runtime's last lists show which ids it has. For an id that no list has, the runtimes are asked:
the proxy's state may be new, and clients may shorten ids.
"""

from virtbus.criproxy.core import calls
from virtbus.criproxy.core.routing import Name
from virtbus.criproxy.edge import messages
from virtbus.criproxy.edge.grpc_server import Call
from virtbus.criproxy.runtimes import NO_LIST, NodeRuntime, Runtimes

REMEMBERED = 4096
"""Number of removed ids that are remembered, so that repeated calls go to the same runtime."""


class Owners:
    """The runtimes by the ids of their sandboxes and containers."""

    def __init__(self, runtimes: Runtimes) -> None:
        self._runtimes = runtimes
        self._removed: dict[str, NodeRuntime] = {}

    async def find(self, of: calls.Of, key: str) -> NodeRuntime:
        """Return the runtime of an id.

        An unknown id counts as one of the runtime of containers. That runtime answers as CRI
        demands: success to a stop or removal, and NOT_FOUND to other calls.

        Raises:
            VirtbusError: 503 `list_unknown`: a runtime that may have the id is away.
        """
        for one in self._runtimes:
            if key in one.entries(calls.LIST[of]):
                return one
        if key in self._removed:
            return self._removed[key]
        for one in self._runtimes:
            if await _has(one, calls.LIST[of], key):
                return one
        return self._runtimes.containers

    def removed(self, key: str, owner: NodeRuntime) -> None:
        self._removed[key] = owner
        while len(self._removed) > REMEMBERED:
            del self._removed[next(iter(self._removed))]

    def of_pod(self, uid: str) -> Name | None:
        for one in self._runtimes:
            listed = one.entries(calls.LIST["sandbox"]).values()
            if uid and any(sandbox.pod_uid == uid for sandbox in listed):
                return one.name
        return None


async def _has(one: NodeRuntime, call: str, key: str) -> bool:
    answer = await one.told(Call(call, messages.by_id(call, key), None), NO_LIST)
    if answer is None:
        return any(known.startswith(key) for known in one.last_list(call))
    return bool(answer)
