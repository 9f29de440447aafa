"""Makes links to exports, checks HTTP requests with such links, and makes the answers' heads."""

import base64
import hashlib
import hmac
import re
from typing import NamedTuple

HEAD_BYTES = 8192
_LINE = re.compile(rb"(GET|HEAD) (/exports/[!-~]{1,512}) HTTP/1\.[01]")
_TARGET = re.compile(
    r"/exports/(?P<export>[0-9a-f-]{36})/(?P<name>disk\.(?:qcow2|raw|raw\.gz))"
    r"\?expires=(?P<expires>[0-9]{1,12})&token=(?P<token>[0-9a-f]{64})"
)
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")
REASONS = {
    200: "OK",
    206: "Partial Content",
    400: "Bad Request",
    403: "Forbidden",
    410: "Gone",
    416: "Range Not Satisfiable",
}


class Asked(NamedTuple):
    """A request for a file; `expires` is Unix time in seconds."""

    export: str
    name: str
    expires: int
    token: str
    body: bool
    """False for HEAD, which gets no body."""
    range: str = ""
    if_range: str = ""


class Span(NamedTuple):
    """The status of an answer, and its range of the file: `start` included, `end` excluded."""

    status: int
    start: int
    end: int


def token(key: bytes, export: str, name: str, expires: int) -> str:
    """Return the token with which one file can be downloaded until `expires`."""
    return hmac.new(key, f"{export}/{name}\n{expires}".encode(), hashlib.sha256).hexdigest()


def path(key: bytes, export: str, name: str, expires: int) -> str:
    """Return the path of a link, with its query."""
    made = token(key, export, name, expires)
    return f"/exports/{export}/{name}?expires={expires}&token={made}"


def asked(head: bytes) -> Asked | None:
    """Return the request of an HTTP head, None for other requests than for a file of an export."""
    first, _, rest = head.partition(b"\r\n")
    line = _LINE.fullmatch(first)
    found = _TARGET.fullmatch(line[2].decode("ascii")) if line else None
    if line is None or found is None:
        return None
    fields: dict[str, str] = {}
    for each in rest.decode("latin-1").split("\r\n"):
        name, _, value = each.partition(":")
        fields.setdefault(name.lower(), value.strip())
    return Asked(
        found["export"],
        found["name"],
        int(found["expires"]),
        found["token"],
        line[1] == b"GET",
        fields.get("range", ""),
        fields.get("if-range", ""),
    )


def refusal(want: Asked, key: bytes, now_s: float) -> int:
    """Return 403 for a wrong token, 410 for an expired link, 0 if the request may be served."""
    right = token(key, want.export, want.name, want.expires)
    if not hmac.compare_digest(right, want.token):
        return 403
    return 410 if now_s >= want.expires else 0


def span(want: Asked, size: int, etag: str) -> Span:
    """Return the status and the bytes of the answer.

    The answer is the complete file if several ranges are requested, or a range of another entity
    tag.
    """
    whole = Span(200, 0, size)
    found = _RANGE.fullmatch(want.range)
    if found is None or found[0] == "bytes=-" or want.if_range not in {"", etag}:
        return whole
    first, last = found[1], found[2]
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    if first and last and int(last) < int(first):
        return whole
    return Span(206, start, end) if start < end else Span(416, 0, 0)


def etag(digest: str) -> str:
    """Return the entity tag of a file by its digest."""
    return f'"{digest}"'


def head(status: int, fields: dict[str, str]) -> bytes:
    """Return the head of an answer."""
    lines = [f"HTTP/1.1 {status} {REASONS[status]}"]
    always = {"Connection": "close", "Cache-Control": "no-store"}
    lines += [f"{name}: {value}" for name, value in (always | fields).items()]
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def file_head(found: Span, size: int, digest: str) -> bytes:
    """Return the head of an answer: 200 or 206 with bytes of a file, or 416."""
    fields = {
        "Content-Type": "application/octet-stream",
        "Content-Length": str(found.end - found.start),
        "Accept-Ranges": "bytes",
        "ETag": etag(digest),
        "Repr-Digest": f"sha-256=:{_base64(digest)}:",
    }
    if found.status == 206:
        fields["Content-Range"] = f"bytes {found.start}-{found.end - 1}/{size}"
    elif found.status == 416:
        fields["Content-Range"] = f"bytes */{size}"
    return head(found.status, fields)


def _base64(digest: str) -> str:
    return base64.b64encode(bytes.fromhex(digest.removeprefix("sha256:"))).decode("ascii")
