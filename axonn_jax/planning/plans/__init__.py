"""Plans of any Flax model: which grid to train it on, from its traced step and the report of `parallelize`."""
