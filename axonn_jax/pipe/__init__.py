"""Pipelines: schedules, channels between stages, the stages' programs, and the engine that runs them."""
