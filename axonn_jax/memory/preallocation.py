"""Device memory on GPUs: the share of it that jax takes for a run, which is nearly all here."""

import os
from collections.abc import Mapping, MutableMapping

from axonn_jax.errors import UserError

FRACTION = 0.92
"""Share of a GPU's memory that runs take and `plan` counts on; CUDA's context and NCCL's buffers have the rest."""
JAXS_OWN = 0.75
"""What jax takes without a variable."""
FRACTION_VARIABLE = "XLA_CLIENT_MEM_FRACTION"
"""jax's variable for it, read when the backend starts."""
_OLD_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
VARIABLES = (FRACTION_VARIABLE, _OLD_VARIABLE, "XLA_PYTHON_CLIENT_PREALLOCATE", _ALLOCATOR)
"""What tells jax how to take a GPU's memory; it refuses the first two together."""


def raise_fraction(environ: MutableMapping[str, str] = os.environ) -> None:
    """Lets jax take `FRACTION` of each of this process's GPUs; call before jax starts.

    It is left alone where the user has set any of jax's variables for device memory.
    """
    if not any(environ.get(name) for name in VARIABLES):
        environ[FRACTION_VARIABLE] = str(FRACTION)


def fraction(environ: Mapping[str, str] = os.environ) -> float:
    """Returns the share of a GPU's memory that jax takes, or at most takes; ``UserError`` for what is no number."""
    if environ.get(_ALLOCATOR, "").lower() == "platform":  # which has no pool
        return 1.0
    name = FRACTION_VARIABLE if environ.get(FRACTION_VARIABLE) else _OLD_VARIABLE
    said = environ.get(name) or str(JAXS_OWN)
    try:
        return float(said)
    except ValueError:
        raise UserError(name, said[:40], "a share of the memory, such as 0.75") from None
