"""What a pipeline rank does next: tasks, orders, the dispatcher. Pure Python: no jax, no MPI, no clock."""
