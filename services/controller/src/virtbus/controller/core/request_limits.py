"""Limits the concurrent requests of each verb, and names the verbs that only read (ADR 0028)."""

REQUESTS_AT_ONCE = 256
"""Limit of concurrent requests of one verb. Further requests first wait, and then get 429."""
READS_AT_ONCE = {
    ("vm", "list"): 8,
    ("vm", "events"): 4,
    ("node", "list"): 8,
    ("image", "list"): 4,
    ("network", "list"): 8,
    ("network", "offers"): 8,
    ("security-group", "list"): 8,
    ("volume", "list"): 8,
    ("snapshot", "list"): 8,
    ("backup", "list"): 4,
    ("backup-schedule", "list"): 8,
    ("imagename", "list"): 8,
    ("operation", "list"): 8,
    ("bus", "status"): 4,
}
"""Lower limits for requests whose answers may be a list of the whole fleet, or 512 KiB of events
(ADR 0028)."""
WATCHES_BEGUN_AT_ONCE = 16
"""Limit of watches whose first list is being sent. Each of these watches needs memory for a task
and a page. More watches would gain no speed, because their lists are sent in turns."""
READS = frozenset({"get", "list", "offers", "events", "status", "pull", "quarantine"}) | {
    *("reset", "soft-reboot", "freeze", "thaw")
}
"""Verbs that work while the bus stores no writes, because they only read or send requests to nodes.

An exception is `node quarantine`, which also writes the record of an adopted VM. `image delete`
writes nothing, but shares its verb with `vm delete`, which does write.
"""
