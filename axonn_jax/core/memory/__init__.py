"""Memory of training: precision, recomputation, gradient buckets, ZeRO and offload."""
