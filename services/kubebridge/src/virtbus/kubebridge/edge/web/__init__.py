"""The single HTTPS port: aggregated API, webhooks, health (ADR 0024).

This package authenticates and parses requests; `core` decides. Only this package imports
`aiohttp.web`.
"""
