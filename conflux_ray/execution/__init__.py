"""Executes Conflux Parallelism: the instance's engine, its plans, and the worker processes that run them.

`engine`, `request` and `plan` are plain Python and run in the instance; the rest runs in a worker and imports torch.
"""
