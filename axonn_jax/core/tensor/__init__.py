"""4D-sharded layers: plain functions on local shards, and the Flax modules that hold their parameters."""
