"""Benchmarks: trace loaders, load generators and the commands behind `conflux bench`."""
