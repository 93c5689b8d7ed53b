"""Processes of a run: discovery, agreement, failure detection."""
