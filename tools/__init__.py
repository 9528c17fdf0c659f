"""What maintainers of this repository run; not part of the package."""
