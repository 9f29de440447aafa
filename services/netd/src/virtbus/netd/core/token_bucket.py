"""Token bucket without a clock: its caller passes the time."""


class TokenBucket:
    """A token bucket of `rate_hz` tokens a second, at most `burst` at once."""

    def __init__(self, rate_hz: float, burst: int) -> None:
        self._rate_hz = rate_hz
        self._burst = burst
        self._tokens = float(burst)
        self._at_s: float | None = None

    def take(self, now_s: float) -> float:
        """Take one token and return 0.0, or return the seconds until the next token."""
        if self._at_s is not None:
            gained = max(0.0, now_s - self._at_s) * self._rate_hz
            self._tokens = min(float(self._burst), self._tokens + gained)
        self._at_s = now_s
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / self._rate_hz
