"""The lock of a run directory: one run at a time trains in it."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from axonn_jax.errors import UserError
from axonn_jax.locks import Held, held, made

if TYPE_CHECKING:
    from axonn_jax.state.agree import Agreement

LOCK = "run.lock"


@contextlib.contextmanager
def only_run_in(directory: str, agreed: "Agreement", say: Callable[[str], None]) -> Iterator[None]:
    """Holds a run's directory; the run's first process does that for all of them.

    It makes the directory, and removes it in the end where nothing has been put into it, bad input for instance.

    Raises ``UserError`` on all processes where another run holds it, or it cannot be written; nothing in it has been
    touched then.
    """
    with contextlib.ExitStack() as stack:
        trouble = ""
        if agreed.rank == 0:
            try:
                stack.enter_context(made(Path(directory)))  # and a run that cannot start leaves none
                if not stack.enter_context(held(Path(directory) / LOCK)):
                    say(f"warning: the file system of {directory} has no locks: nothing keeps a second run out of it")
            except Held as holder:
                trouble = f"a directory that no other run trains in; {holder} does in this one"
            except OSError as error:
                trouble = f"a directory that can be written in: {error.strerror or error}"
        if (trouble := agreed.gather(trouble)[0]) != "":
            raise UserError("log.dir", directory, trouble)
        yield
