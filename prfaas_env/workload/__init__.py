"""Requests: arrivals, lengths, trace readers."""
