"""Reports of writes and reads that nobody waits for any more, after the first that failed: kept off the terminal."""

import logging
import re
import sys
import traceback
import warnings
from typing import Any

_WRITERS = ("orbax", "tensorstore")
_NOBODY_WAITED = ("was never retrieved", "was destroyed but it is pending")
"""What Python's event loops say of a task that failed, or still waited, beside the one whose failure was told."""
_NEVER_BEGUN = r"coroutine '\w*serialize\S*' was never awaited"


class StrayReports:
    """From `__init__` to `close` drops what a failed save or read leaves behind: its first error is told in one line.

    Where one file cannot be written, others usually cannot either: Orbax raises the first failure, and Python shows the
    rest with tracebacks when the garbage collector finds them, at any later time. So after a failure `close` leaves
    this in place; warnings of writes of Orbax that never began stay off in any case.
    """

    def __init__(self) -> None:
        self.failed = False
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._unraisable
        logging.getLogger("asyncio").addFilter(self._keep)
        warnings.filterwarnings("ignore", _NEVER_BEGUN, RuntimeWarning)

    def close(self) -> None:
        """Puts back what was there before, unless reports may still come."""
        if self.failed:
            return
        logging.getLogger("asyncio").removeFilter(self._keep)
        if sys.unraisablehook == self._unraisable:
            sys.unraisablehook = self._hook

    def _unraisable(self, what: Any) -> None:
        """tensorstore still reports to an event loop of Orbax that listens no more; warnings may be errors."""
        error = what.exc_value
        closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not (closed or (isinstance(error, RuntimeWarning) and re.match(_NEVER_BEGUN, str(error)))):
            self._hook(what)

    def _keep(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if not any(said in text for said in _NOBODY_WAITED):
            return True
        error = record.exc_info[1] if record.exc_info else None
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)] if error else []
        return not any(writer in place for writer in _WRITERS for place in (text, *files))
