"""Offline profiler: runs the engine's own code and writes latency profiles (section 6.2; appendix D, "Fitting").

`registry` finds profiles and imports no torch; the rest is behind `conflux profile`.
"""
