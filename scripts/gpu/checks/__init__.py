"""The sections of scripts/gpu/check and the program that runs them."""
