"""KubeVirt's semantics as tables and pure functions: objects and views in, actions out.

Objects are plain values, as parsed from JSON. There is no await, clock, socket, randomness or
client here.
"""
