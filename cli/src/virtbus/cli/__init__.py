"""The `virtbus` command: input and output for people.

The command sends plain maps over the bus, and the server validates them. Decisions about a VM do
not belong here. To start fast, a verb must not import nats, asyncio, pydantic, rich or
opentelemetry. Only `up` and `doctor` may import them.
"""
