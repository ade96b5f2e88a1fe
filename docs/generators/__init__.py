"""Writes the reference from the code: `make docs`. Each module has a function for each page that it writes."""
