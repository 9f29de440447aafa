"""What imaged does: files beneath directory descriptors, and the one door to aiohttp.

Must not enter: a rule about which image is acceptable; those are in `core`.
"""
