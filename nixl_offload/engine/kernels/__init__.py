"""Work on KV blocks where they lie: gather, scatter and checksums, by Triton or by torch."""
