"""Ownership of VMs: people may touch all of them, a bridge only those that it made (ADR 0030).

The server writes the requester's account into each request that crosses accounts, over whatever
stood there. A request without it comes from the account that serves, which is the controllers'.
"""

import json
from collections.abc import Mapping

from virtbus.schemas.errors import Code, VirtbusError

REQUEST_INFO = "Nats-Request-Info"
BRIDGE = "bridge"
"""The user of the only, or first, bridge; further ones are `bridge-<cluster>`."""
_UNKNOWN = "unknown"
_PEOPLE = frozenset({"", "ctl", "client", "observer"})
"""The accounts, in lower case, whose users are held by no owner's mark."""


def account_of(headers: Mapping[str, str]) -> str:
    """The account of who asked; empty within the account that serves."""
    info = headers.get(REQUEST_INFO)
    if info is None:
        return ""
    try:
        account = json.loads(info)["acc"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return _UNKNOWN
    return account if isinstance(account, str) and account else _UNKNOWN


def owner_of(account: str) -> str:
    """The mark of VMs that this account makes, and the only one it may touch; empty: any."""
    name = account.lower()
    return "" if name in _PEOPLE else name


def may_touch(account: str, owner: str) -> bool:
    """True where who asks may see and change VMs that bear `owner`."""
    own = owner_of(account)
    return not own or own == owner


def check_owner(account: str, owner: str) -> None:
    """Raise VirtbusError 403 `not_owner` where `may_touch` says no."""
    if not may_touch(account, owner):
        message = (
            f"the credentials of {owner_of(account)} open its own VMs only; this one is of "
            f"{owner or 'nobody in particular'}"
        )
        raise VirtbusError(Code.DENIED, "not_owner", message)
