"""What is tried: a module for each part of the product. Loaded over the scheduler's primitives."""
