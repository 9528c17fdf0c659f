"""Gather, scatter and checksums of KV blocks on a device, by Triton or by torch."""
