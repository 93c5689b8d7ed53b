"""Adapters in PEFT's files, and merged into the weights of their base."""
