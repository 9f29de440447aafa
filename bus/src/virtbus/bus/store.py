"""What a server's store must be before the server sees it."""

from pathlib import Path

from virtbus.bus.permissions import CONTROL_ACCOUNT

_GLOBAL = "$G"


def ensure_account(store: Path) -> None:
    """Give the streams of a server without accounts to the account that owns them now.

    nats-server keeps streams below their account's name; before virtbus had accounts that was the
    global one. A move within one directory: done or not done, also when killed.
    """
    old, new = store / "jetstream" / _GLOBAL, store / "jetstream" / CONTROL_ACCOUNT
    if old.is_dir() and not new.exists():
        old.rename(new)
