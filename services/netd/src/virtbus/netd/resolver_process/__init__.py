"""The process that resolves names for guests. netd starts it, and it outlives netd.

It is small: it imports neither pydantic nor the client of the bus.
"""
