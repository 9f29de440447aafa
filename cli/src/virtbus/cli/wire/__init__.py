"""A small blocking NATS client for one command (ADR 0010: nats-py costs 240-400 ms to import).

Belongs here: the core protocol, the server's address, requests and their outcomes. Must not enter:
JetStream, records, anything that a service needs; those are in `virtbus.bus`.
"""
