"""Prepared token data: writing it and reading it."""
