"""imaged's effects: files beneath directory descriptors, and the only import of aiohttp.

Must not enter: rules about acceptable images; those are in `core`.
"""
