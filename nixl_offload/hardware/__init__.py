"""What this machine can do: GPUDirect, mounts, drivers, libraries, memory, cores."""
