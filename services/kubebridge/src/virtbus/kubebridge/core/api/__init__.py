"""Decides about calls of the aggregated API."""
