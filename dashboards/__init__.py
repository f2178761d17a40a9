"""Grafana dashboards as code, and the rules that go with them. `python -m dashboards` writes the JSON files anew.

`goodput`, `instances` and `lifecycle` are the dashboards, `panels` the few words they are written in.
"""
