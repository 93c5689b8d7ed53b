"""Steps in virtual time, run by the dispatchers that run real ones."""
