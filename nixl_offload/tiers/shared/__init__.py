"""What tiers have in common that many servers write to: a bucket, a shared directory."""
