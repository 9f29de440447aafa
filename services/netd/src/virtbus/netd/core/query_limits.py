"""Limits of the DNS queries of one guest."""

from virtbus.netd.core.token_bucket import TokenBucket

RATE_HZ, BURST = 200.0, 200
"""Maximum number of queries of a guest: per second, and at once. Further queries wait in the
socket's buffer. The kernel drops queries that do not fit into the buffer."""
LOOKUP_RATE_HZ, LOOKUP_BURST = 20.0, 40
"""Maximum number of questions to the controllers for a guest: per second, and at once. They bound
the load by a guest that invents names."""
BUSY = 32
"""Maximum number of open queries of a guest."""
BUSY_WHEN_FULL = 2
"""Maximum number of open queries of a guest while all guests together have many. A guest with many
queries then leaves room for other guests."""
CONNECTIONS = 4


class QueryLimits:
    """The limits of one guest, with its open queries and connections."""

    def __init__(self) -> None:
        self._queries = TokenBucket(RATE_HZ, BURST)
        self._lookups = TokenBucket(LOOKUP_RATE_HZ, LOOKUP_BURST)
        self.busy = 0
        self.connections = 0

    def wait_s(self, now_s: float) -> float:
        """Count a query and return 0.0, or return the seconds until the next query is allowed."""
        return self._queries.take(now_s)

    def may_look_up(self, now_s: float) -> bool:
        """Count a question to the controllers. Return False if the guest has too many questions."""
        return not self._lookups.take(now_s)

    def is_full(self, *, crowded: bool) -> bool:
        return self.busy >= (BUSY_WHEN_FULL if crowded else BUSY)
