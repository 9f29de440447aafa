"""Reconciles the EndpointSlices of Services that select guests."""
