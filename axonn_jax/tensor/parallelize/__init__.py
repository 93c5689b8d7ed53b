"""Any Flax NNX model on a 4D grid: `ax.parallelize` and what it does to layers."""
