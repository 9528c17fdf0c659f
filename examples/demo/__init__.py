"""The demo: a real vLLM keeps its KV cache in local files and finds it again after a restart.

Run ``python -m examples.demo``.
"""
