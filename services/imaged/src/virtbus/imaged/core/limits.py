"""Defines limits of a transfer, of the store and of downloads (SRC-06 to SRC-11)."""

from dataclasses import dataclass
from pathlib import Path

from virtbus.imaged.core.addresses import Network


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """The limits of one image's transfer."""

    max_bytes: int = 64 * 1024**3
    """Maximum size of an image file."""
    max_virtual_bytes: int = 2 * 1024**4
    """Maximum virtual size that an image may claim (IMG-12)."""
    max_expansion: int = 100
    """A compressed image or layer may expand to 64 MiB plus this number times its size (IMG-14)."""
    min_rate_bytes_s: int = 32 * 1024
    """Minimum rate over `rate_window_s`; a slower transfer counts as stalled (SRC-08)."""
    rate_window_s: float = 60.0
    connect_timeout_s: float = 10.0
    header_timeout_s: float = 15.0
    total_timeout_s: float = 6 * 3600.0
    """Time limit of a transfer, enough for 64 GiB at 3.2 MB/s. Time without a slot does not
    count."""
    slow_turn_s: float = 5.0
    """Time that a pull below the minimum rate keeps its slot while other pulls wait; see
    `core.pull_schedule`."""
    turn_s: float = 60.0
    """Time that a pull at the minimum rate or above keeps its slot while other pulls wait."""
    free_decode_s: float = 30.0
    """CPU time that decoding an image of any size may take."""
    least_decode_bytes_s: int = 4 * 1024**2
    """Decoding may take one more second of CPU time for each such amount of decoded bytes. Usual
    images are decoded 100 times as fast."""
    max_redirects: int = 3
    attempts: int = 5
    backoff_s: float = 1.0
    """The first pause between attempts; it doubles, with jitter, up to `max_backoff_s`."""
    max_backoff_s: float = 60.0
    allowed_addresses: tuple[Network, ...] = ()
    """Networks from which images may be fetched, besides public addresses (`core.addresses`)."""


@dataclass(frozen=True, slots=True)
class SpaceLimits:
    """Limits of the store's disk. A `quota_bytes` of 0 means no quota."""

    min_free_bytes: int = 2 * 1024**3
    min_free_ratio: float = 0.01
    quota_bytes: int = 0

    def floor_bytes(self, disk_bytes: int) -> int:
        """Return the bytes of a disk of this size that must stay free."""
        return max(int(disk_bytes * self.min_free_ratio), self.min_free_bytes)


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    """The HTTP server for exports: its address, and the limits for its readers."""

    address: tuple[str, int]
    url: str
    """The beginning of each link to an export."""
    certificate: tuple[Path, Path] | None = None
    """The files of a certificate and its key, for HTTPS; None for HTTP."""
    at_once: int = 32
    """Maximum number of connections. One client address has at most three quarters of the
    connections."""
    bytes_per_s: int = 0
    """Maximum rate of all downloads together; 0 means no limit."""
    head_s: float = 10.0
    """Time limit of the handshake and the head of a request."""
    stall_s: float = 60.0
    """Time in which a reader must take 256 KiB."""
    listen_again_s: float = 10.0
