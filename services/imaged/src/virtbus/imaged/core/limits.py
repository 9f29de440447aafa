"""Bounds of a transfer; every one has a unit and a reason (SRC-06 … SRC-11)."""

from dataclasses import dataclass

from virtbus.imaged.core.addresses import Network


@dataclass(frozen=True, slots=True)
class Limits:
    """What a source may cost before it is given up."""

    max_bytes: int = 64 * 1024**3
    """The largest image file."""
    max_virtual_bytes: int = 2 * 1024**4
    """The largest disk an image may claim (IMG-12)."""
    max_expansion: int = 100
    """How many times its size a container's layer may expand to, beyond 64 MiB (IMG-14)."""
    min_rate_bytes_s: int = 32 * 1024
    """Slower than this over a whole window is a stall (SRC-08)."""
    rate_window_s: float = 60.0
    connect_timeout_s: float = 10.0
    header_timeout_s: float = 15.0
    total_timeout_s: float = 6 * 3600.0
    """64 GiB at 3 MB/s; the rate limit ends what merely hangs. Waiting for a turn is not in it."""
    slow_turn_s: float = 5.0
    """How long a pull slower than the least rate keeps its slot while others wait: `core.turns`."""
    turn_s: float = 60.0
    """How long any other does."""
    free_decode_s: float = 30.0
    """CPU time that reading an image's layers may take whatever their size, and beyond it"""
    least_decode_bytes_s: int = 4 * 1024**2
    """one second for so many bytes that they expand to; usual layers give 100 times as many."""
    max_redirects: int = 3
    attempts: int = 5
    backoff_s: float = 1.0
    """The first pause between attempts; it doubles, with jitter, up to `max_backoff_s`."""
    max_backoff_s: float = 60.0
    allowed_addresses: tuple[Network, ...] = ()
    """Networks beside the public ones that may be fetched from (`core.addresses`)."""
