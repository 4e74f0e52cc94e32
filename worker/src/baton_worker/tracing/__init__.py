"""Traces of requests across processes: W3C trace context in and out, spans to a collector."""
