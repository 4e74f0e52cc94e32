"""Baton's Grafana dashboards, written in Python; `generate.py` writes the chart's JSON."""
