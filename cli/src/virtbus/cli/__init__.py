"""The `virtbus` command.

Belongs here: what people type and read. It speaks plain maps over the bus and leaves validation to
the server. Must not enter: anything that decides about a VM, and (but for `up` and `doctor`) any
import that costs start-up time: no nats, asyncio, pydantic, rich, opentelemetry on a verb's path.
"""
