"""Decides: routes, filters, merged conditions. Values in, values out; it knows no gRPC.

It reads no protobuf, waits for nothing and writes nothing.
"""
