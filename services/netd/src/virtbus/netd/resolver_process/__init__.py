"""The process that resolves names for guests. netd starts it, and it outlives netd.

To stay small, the process imports neither pydantic nor the bus client.
"""
