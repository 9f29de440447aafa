"""The `virtbus` command.

Belongs here: input and output for people. It sends plain maps over the bus and leaves validation to
the server. Must not enter: decisions about a VM, and (except in `up` and `doctor`) imports that
slow the start: no nats, asyncio, pydantic, rich, opentelemetry on a verb's path.
"""
