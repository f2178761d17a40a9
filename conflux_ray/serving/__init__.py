"""The HTTP side: OpenAI ingress replicas, and the global router inside each of them.

`ingress` is the Ray Serve deployment; `middleware` guards what it serves; `dispatcher` keeps every request alive on
some instance, chosen by `router`, among those that a `directory` lists. vLLM's front end, which sits between
middleware and dispatcher, is built in `conflux_ray.vllm_compat.frontend`.
"""
