"""MPI tags of messages between stages, one per shard of an array."""

from axonn_jax.core.errors import UserError
from axonn_jax.pipe.schedule.tasks import Message


class Tags:
    """MPI tags for (stage, microbatch, shard): `(microbatch * stages + stage) * shards + shard`."""

    def __init__(self, stages: int, shards: int, largest: int):
        self._stages, self._shards, self._largest = stages, shards, largest

    @property
    def microbatches(self) -> int:
        """Number of microbatches that the tags suffice for."""
        return (self._largest + 1) // (self._stages * self._shards)

    def of(self, message: Message, shard: int = 0) -> int:
        """Return the tag of a shard.

        Raises:
            UserError: The tag exceeds what this MPI allows.
        """
        if message.microbatch >= self.microbatches:
            raise UserError(
                "train.microbatches", f"{message.microbatch + 1} or more",
                f"at most {self.microbatches}: this MPI has tags up to {self._largest} (MPI_TAG_UB) for "
                f"{self._stages} stages and {self._shards} devices a process",
            )  # fmt: skip
        return (message.microbatch * self._stages + message.stage) * self._shards + shard

    def read(self, tag: int) -> tuple[int, int, int]:
        """Return the stage, microbatch and shard that a tag stands for."""
        index, shard = divmod(tag, self._shards)
        microbatch, stage = divmod(index, self._stages)
        return stage, microbatch, shard
