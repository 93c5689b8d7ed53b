"""Flax NNX models on a 4D grid: `ax.parallelize` and the sharded layers behind it."""
