"""A script for `mpirun`: texts, numbers and errors of two processes, over MPI and over jax, printed by each."""

import json

from mpi4py import MPI

import axonn_jax as ax
from axonn_jax.core.distributed.host_sync import JaxSync, MpiSync, together
from axonn_jax.core.errors import UserError

grid = ax.init(data=2)
got = []
for sync in (MpiSync(MPI.COMM_WORLD), JaxSync(grid)):
    texts = sync.gather(["", "\0é" * 1_000_001 + "\0"][sync.rank])
    got += [[len(text) for text in texts], texts[1][-3:], sync.gather(""), sync.gather("a" * 1024 * sync.rank)[1][-1:]]
    got.append(sync.gather_number(2**40 + sync.rank))
    try:
        with together(sync):
            if sync.rank == 1:
                raise UserError("a.field", 3, "x" * 5000)
    except UserError as error:
        got.append([error.field.removeprefix("rank 1's "), str(error.value), len(error.accepted)])
print(json.dumps({"rank": grid.rank, "got": got}), flush=True)
