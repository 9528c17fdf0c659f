"""Facts about this machine: GPUDirect Storage, mounts, drivers, libraries, memory, cores."""
