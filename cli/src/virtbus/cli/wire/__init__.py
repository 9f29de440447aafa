"""A small blocking NATS client for one command's life (ADR: nats-py costs 240-400 ms to import).

Belongs here: the core protocol, the place of the server, requests and their outcomes. Must not
enter: JetStream, records, anything that a service needs; those are `virtbus.bus`.
"""
