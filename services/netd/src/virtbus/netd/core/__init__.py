"""netd's decisions: names, addresses, rules, messages. Values in, values out.

Code with asyncio, sockets, clocks, files or processes belongs in `edge`.
"""
