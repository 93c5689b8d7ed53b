"""Configuration, the trainer and the run around it."""
