"""Checks of the tree itself that `make check` runs beside the linters."""
