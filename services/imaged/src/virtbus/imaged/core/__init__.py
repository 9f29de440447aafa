"""imaged's decisions: headers, names, addresses, disk layouts. Values in, values out.

Must not enter: files, sockets, clocks, tasks.
"""
