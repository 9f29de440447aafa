"""Encodes rtnetlink calls and decodes answers. Only this module imports pyroute2.

`edge.netlink` sends the calls. ADR 0009 says why pyroute2's own sockets are not used.
"""

import errno
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

from virtbus.netd.core.netlink import (
    HEADER_BYTES,
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    NetlinkCall,
    Reply,
)


def _without_init(package: str) -> None:
    """Make submodules importable without the `__init__` of their package.

    pyroute2's `__init__` imports the whole library, for five times the CPU and ten times the
    memory.
    """
    spec = importlib.util.find_spec(package)
    if spec is not None:
        sys.modules.setdefault(package, importlib.util.module_from_spec(spec))


_without_init("pyroute2")

from pyroute2.netlink import nlmsg  # noqa: E402
from pyroute2.netlink.rtnl import RTM_NEWLINK, RTM_NEWNEIGH  # noqa: E402
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg  # noqa: E402
from pyroute2.netlink.rtnl.ndmsg import ndmsg  # noqa: E402

Message = nlmsg
Attribute = tuple[str, Any]
"""A name and a value in pyroute2's form. pyroute2 silently omits unknown names."""


def nest(*attributes: Attribute) -> dict[str, Any]:
    """Return the value of an attribute that contains other attributes."""
    return {"attrs": list(attributes)}


@dataclass(frozen=True, slots=True)
class Objects:
    """A kind of kernel object.

    `new` is its RTM_NEW number; the next numbers are delete, get and set.
    """

    message: type[Message]
    new: int

    def ensure(self, name: str, *attributes: Attribute, **fields: int) -> NetlinkCall:
        """Return the call that makes an object. An existing object stays unchanged."""
        return NetlinkCall(
            f"add {name}",
            self.new,
            NLM_F_CREATE | NLM_F_EXCL,
            self._body(attributes, fields),
            tolerated=(errno.EEXIST,),
        )

    def put(self, name: str, *attributes: Attribute, **fields: int) -> NetlinkCall:
        body = self._body(attributes, fields)
        return NetlinkCall(f"put {name}", self.new, NLM_F_CREATE | NLM_F_REPLACE, body)

    def delete(self, name: str, *attributes: Attribute, gone: int, **fields: int) -> NetlinkCall:
        """Return the call that deletes an object. `gone` is the tolerated errno."""
        return NetlinkCall(
            f"delete {name}", self.new + 1, 0, self._body(attributes, fields), tolerated=(gone,)
        )

    def list_all(self, name: str, **fields: int) -> NetlinkCall:
        body = self._body((), fields)
        return NetlinkCall(f"list {name}", self.new + 2, NLM_F_DUMP, body, acked=False)

    def set(self, name: str, *attributes: Attribute, **fields: int) -> NetlinkCall:
        return NetlinkCall(f"set {name}", self.new + 3, 0, self._body(attributes, fields))

    def set_port(self, name: str, *attributes: Attribute, **fields: int) -> NetlinkCall:
        """Return the call that changes a port's properties, which the kernel ignores in `set`."""
        return NetlinkCall(f"set port {name}", self.new, 0, self._body(attributes, fields))

    def read(self, reply: Reply) -> Message:
        """Return the object in an answer. Each read of an attribute decodes it."""
        message = self.message(reply.message)
        message.decode()
        return message

    def _body(self, attributes: tuple[Attribute, ...], fields: dict[str, int]) -> bytes:
        message = self.message()
        message.update(fields)
        message["attrs"] = list(attributes)
        message.encode()
        return bytes(message.data[HEADER_BYTES:])


LINKS = Objects(ifinfmsg, RTM_NEWLINK)
NEIGHBOURS = Objects(ndmsg, RTM_NEWNEIGH)
FORWARDING = Objects(ifinfmsg, RTM_NEWNEIGH)
"""A bridge port's forwarding entries. The kernel filters them by port only if the request has a
link's header (`rtnl_fdb_dump`).
"""
