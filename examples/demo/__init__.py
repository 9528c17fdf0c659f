"""The demo: a real vLLM keeps its KV cache in files or in a bucket, and a new engine finds it there.

Run ``python -m examples.demo``, with ``--s3`` for the bucket.
"""
