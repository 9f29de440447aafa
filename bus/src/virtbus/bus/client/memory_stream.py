"""Keeps a stream of the bus in memory: revisions, CAS, purge markers, TTLs and a size limit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from virtbus.bus.client.filters import matches
from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.bus.errors import ConflictError, FullError

MAX_PAYLOAD_BYTES = 1024 * 1024
MARKER_TTL_S = 60.0

Seen = Callable[[Entry], None]


@dataclass(slots=True)
class MemoryStream:
    """The last message of each key, as in a bucket. `clock_ns` times the writes and TTLs."""

    clock_ns: Callable[[], int]
    markers: bool = False
    """If True, an entry whose TTL ends becomes a purge marker (bucket `lease`)."""
    max_bytes: int = 0
    """Size limit; 0 means none. A write beyond the limit is refused, as with `discard: new`."""
    revision: int = 0
    entries: dict[str, Entry] = field(default_factory=dict)
    expires_ns: dict[str, int] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    message_ids: dict[str, int] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(len(e.key) + len(e.value) for e in self.entries.values())

    def last(self, key_filter: str) -> Entry | None:
        """Return the newest entry of a key or filter, even a purge marker."""
        if "*" not in key_filter and ">" not in key_filter:
            return self.entries.get(key_filter)
        end = key_filter.rpartition(".")[2].rstrip(">*")
        found = [
            entry
            for key, entry in self.entries.items()
            if key.endswith(end) and matches(key_filter, key)
        ]
        return max(found, key=lambda entry: entry.revision, default=None)

    def listed(self, filters: Sequence[str]) -> list[Entry]:
        found = [e for e in self.entries.values() if any(matches(f, e.key) for f in filters)]
        return sorted(found, key=lambda entry: entry.revision)

    def check(self, key: str, value: bytes, expect: int | None, expect_over: str | None) -> None:
        if len(value) > MAX_PAYLOAD_BYTES:
            msg = f"{len(value)} bytes are more than the bus takes ({MAX_PAYLOAD_BYTES})"
            raise FullError(msg)
        if expect is not None:
            last = self.last(expect_over or key)
            revision = last.revision if last is not None else 0
            if revision != expect:
                msg = f"wrong last sequence: {revision}"
                raise ConflictError(msg)
        if self.max_bytes and value and self.size_bytes + len(value) > self.max_bytes:
            msg = "maximum bytes exceeded"
            raise FullError(msg)

    def apply(
        self, key: str, value: bytes | None, *, ttl_s: float | None = None, why: bytes = b""
    ) -> Entry:
        """Store a value and notify watches. None stores a purge marker with the reason `why`."""
        self.revision += 1
        now_ns = self.clock_ns()
        kind = EntryKind.PUT if value is not None else EntryKind.PURGE
        entry = Entry(key, value or b"", self.revision, kind, now_ns, b"" if value else why)
        self.entries[key] = entry
        self.expires_ns.pop(key, None)
        if ttl_s is not None:
            self.expires_ns[key] = now_ns + int(ttl_s * 1e9)
        for seen in tuple(self.seen):
            seen(entry)
        return entry

    def expire(self) -> None:
        now_ns = self.clock_ns()
        for key in [key for key, at_ns in self.expires_ns.items() if at_ns <= now_ns]:
            entry = self.entries.pop(key)
            del self.expires_ns[key]
            if self.markers and entry.kind is EntryKind.PUT:
                self.apply(key, None, ttl_s=MARKER_TTL_S)
