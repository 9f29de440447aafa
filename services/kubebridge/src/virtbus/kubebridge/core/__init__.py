"""KubeVirt's semantics as tables and pure functions: objects and views in, actions out.

Objects are plain values, as JSON brings them. No await, clock, socket, randomness or client.
"""
