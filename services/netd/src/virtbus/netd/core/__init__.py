"""What netd decides: names, addresses, rules, messages. Values in, values out.

Must not enter: asyncio, sockets, clocks, files, processes. What does belongs in `edge`.
"""
