"""Communication of a training step, collective by collective, from formulas; no jax.

Counted is one program: forward, backward and optimizer of a model on one mesh. Beside the algebra, three rules:

* A weight that is gathered outside of recomputation depends on nothing but parameters, so the compiler gathers it once
  a step, not once a microbatch (XLA's loop-invariant code motion); recomputed gathers stay with their microbatch, and
  so do those of scanned layers, unless the program itself gathers once a step.
* A tied table is gathered once for embedding and head, and the sum of its two gradients is reduce-scattered once.
* Recomputation leaves out results that the backward pass does not read: the all-reduce of a block's last matmul, and
  all of embedding, final norm, head and loss, which are outside of the blocks.

With the stream split along its sequence over `y`, a matmul's input is all-gathered and its dX reduce-scattered,
additions to the stream are reduce-scattered and their gradient all-gathered, each half the bytes of an all-reduce.
Blocks gather once more in the backward pass, under `none` too, where only the part is kept till then.
"""
