"""The demo of shared tiers: a vLLM answers from what another vLLM, of which it knows nothing, left in a bucket.

Run ``python -m examples.demo_s3``.
"""
