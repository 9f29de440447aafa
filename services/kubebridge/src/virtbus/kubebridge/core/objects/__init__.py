"""Reads JSON objects of Kubernetes, and formats their times, quantities and refusals."""
