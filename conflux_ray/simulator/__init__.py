"""Discrete-event simulator at iteration level: Conflux Parallelism, the paper's baselines and data parallelism.

Pure Python and NumPy. Conflux runs the planner's own code (`conflux_ray.planning`); every system reads its iteration
times from the same hardware figures (`hardware.py`). `docs/simulator.md` says what is modelled and what is not.
"""
