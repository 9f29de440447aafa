"""Checks VM ownership: bridges and container runtimes may touch only VMs that they created.

People may touch all VMs (ADR 0030).

The NATS server writes the requester's account into the header `Nats-Request-Info` of each request
that crosses accounts. A request without this header comes from the controllers' own account.

The server replaces a forged header, and writes its own header two bytes before the end of the
header block. If the block does not end with an empty line, the server's header becomes a part of
the last line, and a forged header may stay. So a request is invalid if the name or the value of
another header contains `Nats-Request-Info`.
"""

import json
from collections.abc import Mapping
from functools import lru_cache

from virtbus.schemas.errors import Code, VirtbusError

REQUEST_INFO = "Nats-Request-Info"
BRIDGE = "bridge"
"""The user name of the first bridge. Further bridges are `bridge-<cluster>`."""
CRI = "cri-"
"""Prefix of the user name of a node's container runtime: `cri-<node>` (ADR 0059)."""
UNKNOWN = "unknown"
"""Stands for the account of a request with a malformed header block. The request is refused."""
KEPT_CHARS = 1024
"""Texts of a request's header up to this length are remembered. The server's own have some 300."""
_PEOPLE = frozenset({"", "ctl", "client", "observer"})
"""The accounts, in lower case, whose users may touch every VM."""


def account_of(headers: Mapping[str, str]) -> str:
    """Return the requester's account: empty for the controllers' own, UNKNOWN if unreadable."""
    named = [name for name in headers if REQUEST_INFO in name or REQUEST_INFO in headers[name]]
    if not named:
        return ""
    if named != [REQUEST_INFO]:
        return UNKNOWN
    info = headers[REQUEST_INFO]
    return _known_account(info) if len(info) <= KEPT_CHARS else _account_in(info)


@lru_cache(maxsize=256)
def _known_account(info: str) -> str:
    """Return the account in a short text. A client's text changes only with the server's pings."""
    return _account_in(info)


def _account_in(info: str) -> str:
    try:
        account = json.loads(info)["acc"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return UNKNOWN
    return account if isinstance(account, str) and account else UNKNOWN


def owner_of(account: str) -> str:
    """Return the owner of the VMs that `account` creates; empty if `account` may touch all VMs."""
    name = account.lower()
    return "" if name in _PEOPLE else name


def node_of(account: str) -> str:
    """Return the only node that `account` may use; empty if `account` may use all nodes."""
    name = account.lower()
    return name.removeprefix(CRI) if name.startswith(CRI) else ""


def may_touch(account: str, owner: str) -> bool:
    """Return True if the account may see and change VMs of `owner`."""
    own = owner_of(account)
    return not own or own == owner


def check_owner(account: str, owner: str) -> None:
    """Raise VirtbusError 403 `not_owner` if `may_touch` is False."""
    if not may_touch(account, owner):
        message = (
            f"the credentials of {owner_of(account)} may use only its own VMs; this VM belongs to "
            f"{owner or 'nobody in particular'}"
        )
        raise VirtbusError(Code.DENIED, "not_owner", message)
