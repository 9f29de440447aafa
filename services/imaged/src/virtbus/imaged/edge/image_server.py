"""Describes the server of a download: the headers that it needs, and the meaning of its errors."""

import email.utils
import time
from typing import NoReturn

import aiohttp

from virtbus.imaged.core.sources import shown
from virtbus.imaged.edge.local_files import not_found
from virtbus.imaged.edge.transient import TransientError
from virtbus.schemas.errors import Code, VirtbusError

_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class ImageServer:
    """A plain web server without logins; `what` is the address of the file, for error texts."""

    next_step = (
        "check the address, its server and this node's network; a server on a private, link-local "
        "or loopback address needs the setting image_addresses, one with its own certificate "
        "authority a transport in images.d; imaged's log says more"
    )
    """The advice in the error text if the server is unreachable."""

    def __init__(self, what: str) -> None:
        self.what = what

    @property
    def url(self) -> str:
        """Return a URL of the server. Only this server gets the secrets of a transport."""
        return self.what

    def headers(self) -> dict[str, str]:
        return {}

    def accepted(self) -> None:
        """Take note of a successful response. A server without logins does nothing."""

    async def refuse(self, response: aiohttp.ClientResponse) -> NoReturn:
        """Raise the error for a response that does not contain the file.

        Raises:
            TransientError: another attempt may help.
            AgainError: `headers` returns a new login, so the caller repeats the request at once.
            VirtbusError: 403 `image_denied`. 404 `image_not_found`. 422 `image_source_refused`.
        """
        status = response.status
        if status in _TRANSIENT_STATUS:
            raise TransientError(f"the server answers {status}", _retry_after_s(response))
        if status in {404, 410}:
            raise not_found(self.what)
        denied = status in {401, 403}
        raise VirtbusError(
            Code.DENIED if denied else Code.UNSUPPORTED,
            "image_denied" if denied else "image_source_refused",
            f"the server of {shown(self.what)} answers {status}; "
            "open the address in a browser to see why; imaged needs an address without a login",
        )

    def check_encoding(self, response: aiohttp.ClientResponse) -> None:
        """Raise 422 `content_encoding` if the body is compressed or otherwise encoded (SRC-09)."""
        encoding = response.headers.get("Content-Encoding", "identity").lower()
        if encoding != "identity":
            raise VirtbusError(
                Code.UNSUPPORTED,
                "content_encoding",
                f"{shown(self.what)} comes encoded as {encoding[:32]!r}, which was not asked for; "
                "configure its server to send the file as it is",
            )


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    text = response.headers.get("Retry-After", "")
    if text.isdecimal():
        return float(text[:6])
    try:
        at = email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return 0.0
    return max(0.0, at - time.time())
