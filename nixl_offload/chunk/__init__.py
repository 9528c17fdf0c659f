"""The bytes of a chunk: its header, its checksums, and where its blocks lie."""
