"""The owner of the NATS client, and a fake with the same contract.

Belongs here: connection, records, watches, services, events, trace context. Must not enter:
anything that knows what a VM is, beyond the names of streams and subjects.
"""
