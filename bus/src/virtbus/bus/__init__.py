"""How things are said: the one owner of the NATS client, and a fake with the same contract.

Belongs here: connection, records, watches, services, facts, trace context. Must not enter:
anything that knows what a VM is, beyond the names of streams and subjects.
"""
