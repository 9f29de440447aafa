"""The proxy's decisions as pure functions: routes, filters, merged conditions.

The functions know neither gRPC nor protobuf.
"""
