"""Measuring a running server: an open-loop client, what its runs show, and servers that are compared by it.

`stream` reads one answer, `client` sends a trace, `point` runs one rate, `score` says what was attained, `search` looks
for the largest rate that passes; `contenders`, `servers` and `report` set several servers side by side.
"""
