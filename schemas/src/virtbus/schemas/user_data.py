"""Detects the kind of user data by its first bytes, as cloud-init does."""

import re

CLOUD_CONFIG = "text/cloud-config"
SCRIPT = "text/x-shellscript"
MIME = "multipart/mixed"
GZIP = "application/gzip"
CONTENT_TYPE = r"^[a-z]{1,16}/[A-Za-z0-9][A-Za-z0-9.+-]{0,63}$"
"""A MIME type without parameters."""
_KINDS = (
    ("#cloud-config-archive", "text/cloud-config-archive"),
    ("#cloud-config-jsonp", "text/cloud-config-jsonp"),
    ("#cloud-boothook", "text/cloud-boothook"),
    ("#cloud-config", CLOUD_CONFIG),
    ("#part-handler", "text/part-handler"),
    ("#include-once", "text/x-include-once-url"),
    ("#include", "text/x-include-url"),
    ("## template: jinja", "text/jinja2"),
    ("#!", SCRIPT),
)
"""The MIME type for the start of a first line (the page explanation/format of cloud-init's
documentation). If two entries match, the longer one is first."""
_HEADER = re.compile(r"(?:mime-version|content-type):", re.IGNORECASE)
_START = 4096
"""The number of characters in which cloud-init looks for the first line of a kind, or for a MIME
header."""


def content_type(data: bytes) -> str:
    """Return the MIME type by the first line; empty for data of a kind that cloud-init ignores."""
    if data.startswith(b"\x1f\x8b"):
        return GZIP
    try:
        start = data.decode()[:_START].lstrip()
    except UnicodeDecodeError:
        return ""
    if _HEADER.match(start):
        return MIME
    lower = start[:64].lower()
    return next((kind for prefix, kind in _KINDS if lower.startswith(prefix)), "")
