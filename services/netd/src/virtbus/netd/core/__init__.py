"""netd's decisions: names, addresses, rules, messages. Values in, values out.

Must not enter: asyncio, sockets, clocks, files, processes. Those belong in `edge`.
"""
