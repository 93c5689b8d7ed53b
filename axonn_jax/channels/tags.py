"""MPI tags of messages between stages: one for each shard of an array."""

from axonn_jax.errors import UserError
from axonn_jax.schedule.tasks import Message


class Tags:
    """MPI tags for (stage, microbatch, shard): `(microbatch * stages + stage) * shards + shard`."""

    def __init__(self, stages: int, shards: int, largest: int):
        self._stages, self._shards, self._largest = stages, shards, largest

    @property
    def microbatches(self) -> int:
        """Microbatches for which there are tags."""
        return (self._largest + 1) // (self._stages * self._shards)

    def of(self, message: Message, shard: int = 0) -> int:
        """Return the tag of a shard; ``UserError`` where this MPI's tags do not go that far."""
        if message.microbatch >= self.microbatches:
            raise UserError(
                "train.microbatches", f"{message.microbatch + 1} or more",
                f"at most {self.microbatches}: this MPI has tags up to {self._largest} (MPI_TAG_UB) for "
                f"{self._stages} stages and {self._shards} devices a process",
            )  # fmt: skip
        return (message.microbatch * self._stages + message.stage) * self._shards + shard

    def read(self, tag: int) -> tuple[int, int, int]:
        """Return stage, microbatch and shard of a tag."""
        rest, shard = divmod(tag, self._shards)
        microbatch, stage = divmod(rest, self._stages)
        return stage, microbatch, shard
