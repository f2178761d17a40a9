"""The only package that imports vLLM: one exact version, checked at start, never patched."""
