"""Prepared token data: writer and reader."""
