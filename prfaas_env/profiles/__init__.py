"""Attention geometry to bytes, hardware latency, and the catalogue of published models."""
