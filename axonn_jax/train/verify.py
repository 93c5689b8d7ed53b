"""The check of a run's data against its checksums: every copy is read once, by all processes that see it together."""

from pathlib import Path

from axonn_jax.data.manifest import MANIFEST, Manifest, checksum
from axonn_jax.errors import UserError
from axonn_jax.state.agree import Agreement


def verify_data(path: str, agreed: Agreement) -> None:
    """Compares shards and tokenizer with their checksums; collective over all processes.

    Processes that see the same files, on one host or through a shared file system, read a share of them each; a
    host with a copy of its own reads that. Raises ``UserError``, the same on all, where one finds a fault or another
    data set.
    """
    found = (Path(path) / MANIFEST).stat()
    # A shared file is the same one everywhere; copies of it are not, also where they were made alike.
    which = f"{found.st_ino} {found.st_mtime_ns} {found.st_ctime_ns}"
    content = checksum(Path(path) / MANIFEST)
    everyone = [told.rpartition(" ") for told in agreed.gather(f"{which} {content}")]
    for rank, (_, _, other) in enumerate(everyone):
        if other != everyone[0][2]:
            raise UserError("data.path", path, f"the same data on every process; rank {rank}'s is not rank 0's")
    together = [rank for rank, told in enumerate(everyone) if told[0] == which]
    fault = ""
    try:
        Manifest.load(path).verify(share=(together.index(agreed.rank), len(together)))
    except UserError as error:
        fault = error.accepted
    if faults := [text for text in agreed.gather(fault) if text]:
        raise UserError("data.path", path, faults[0])
