"""Models for tests, demonstrations and `make serve`, obtained without a model hub, and the answers they should give.

`store.model_dir(name)` is the way in. Importing this package or the store imports neither torch nor transformers.
"""
