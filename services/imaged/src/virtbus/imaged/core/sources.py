"""Checks image sources: URLs, redirects, local files, and resumed transfers."""

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from virtbus.schemas.errors import Code, VirtbusError

_CONTENT_RANGE = re.compile(r"^bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})$")


@dataclass(frozen=True, slots=True)
class Validators:
    """The version of a remote file: the values of `ETag` and `Last-Modified`, empty if missing."""

    etag: str = ""
    last_modified: str = ""

    @property
    def if_range(self) -> str:
        """The value of `If-Range`, which must not be a weak tag; empty if there is no value."""
        return self.etag if self.etag and not self.etag.startswith("W/") else self.last_modified


def shown(url: str) -> str:
    """Return `url` for display: without its query, which may contain a signature."""
    return url.partition("?")[0].partition("#")[0][:300]


def url_invalid(url: str) -> VirtbusError:
    """Return the error 400 `image_url_invalid`."""
    return VirtbusError(
        Code.INVALID,
        "image_url_invalid",
        f"{shown(url)!r} is no URL that can be fetched; write it like "
        "https://images.example.org/disk.qcow2 or http://192.0.2.7/disk.qcow2",
    )


def check_url(url: str) -> SplitResult:
    """Return the parts of an http(s) URL.

    Raises:
        VirtbusError: 400 `image_url_invalid`, `image_url_credentials`.
    """
    try:
        parts = urlsplit(url)
        port_is_good = parts.port is None or parts.port > 0
    except ValueError:
        parts, port_is_good = SplitResult("", "", "", "", ""), False
    if parts.scheme not in {"http", "https"} or not parts.hostname or not port_is_good:
        raise url_invalid(url)
    if "@" in parts.netloc:
        raise VirtbusError(
            Code.INVALID,
            "image_url_credentials",
            "the image URL holds a user name or password, which would end up in records and logs; "
            "offer the image without, or by a signed URL",
        )
    return parts


def origin_of(url: str) -> tuple[str, str, int | None]:
    """Return scheme, host and port of an http(s) URL."""
    parts = check_url(url)
    default = 443 if parts.scheme == "https" else 80
    return parts.scheme, (parts.hostname or "").rstrip("."), parts.port or default


def is_literal_loopback(host: str) -> bool:
    """Return True for `localhost` and for literal addresses in 127.0.0.0/8 or ::1."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def redirect_target(start: str, current: str, location: str) -> str:
    """Return the URL of a redirect, checked like a first URL.

    Raises:
        VirtbusError: 403 `redirect_refused`: the redirect leads to a scheme that is not http(s),
            from https to http, or to this machine. A redirect to this machine is allowed if `start`
            has the same host and port. The errors of `check_url`.
    """
    try:
        target = urljoin(current, location)
    except ValueError:  # such as `http://[`
        raise url_invalid(location) from None
    scheme = target.partition(":")[0].lower()
    if scheme not in {"http", "https"}:
        raise _redirect_refused(current, f"leads to a {scheme[:16]!r} URL")
    parts = check_url(target)
    if urlsplit(current).scheme == "https" and parts.scheme == "http":
        raise _redirect_refused(current, "leads from https to http")
    first = urlsplit(start)
    if is_literal_loopback(parts.hostname or "") and parts.netloc != first.netloc:
        raise _redirect_refused(current, "leads to this machine itself")
    return target


def _redirect_refused(url: str, why: str) -> VirtbusError:
    return VirtbusError(
        Code.DENIED,
        "redirect_refused",
        f"the redirect of {shown(url)} {why}; use the final address of the image",
    )


def resumed_total(content_range: str, offset: int) -> int | None:
    """Return the file's size by the Content-Range of a 206 answer.

    Return None if the range does not go from `offset` to the end of the file.
    """
    match = _CONTENT_RANGE.fullmatch(content_range.strip())
    if match is None:
        return None
    first, last, total = (int(group) for group in match.groups())
    return total if first == offset and last == total - 1 and first <= last else None


def beneath(url: str, roots: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the root (of `roots`) of a `file://` URL, and the path components below the root.

    Raises:
        VirtbusError: 403 `file_not_allowed`: the URL has another host, a query or a fragment, or is
            outside of all roots. Or a path component is `.`, `..` or empty, or has NUL, plain or
            percent-encoded.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # such as `file://[`
        parts = SplitResult("file", url, "", "", "")
    path = unquote(parts.path)
    local = parts.netloc in {"", "localhost"} and not parts.query and not parts.fragment
    for root in roots:
        prefix = root.rstrip("/") + "/"
        if local and path.startswith(prefix):
            names = tuple(path[len(prefix) :].split("/"))
            if all(name not in {"", ".", ".."} and "\0" not in name for name in names):
                return root, names
    raise VirtbusError(
        Code.DENIED,
        "file_not_allowed",
        f"{shown(url)} is outside the directories that images may come from; "
        f"put it beneath {' or '.join(roots)}, or extend the setting allowed_roots",
    )
