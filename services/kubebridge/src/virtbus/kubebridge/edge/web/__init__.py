"""The one HTTPS port: aggregated API, webhooks, health (ADR 0024).

Who asks and what they asked is read here; what follows is decided in `core`. Nothing else
imports `aiohttp.web`.
"""
