"""The one exception for a user's mistake."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """Bad input: one line that names the field, the value given and what would be accepted.

    The command line prints it without a traceback and exits with status 2.
    """

    def __init__(self, field: str, value: object, accepted: str):
        self.field, self.value, self.accepted = field, value, accepted
        shown = " ".join(str(value).split()) if not isinstance(value, str) else repr(value)
        super().__init__(f"{field} = {shown}: {' '.join(accepted.split())}")


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` for the known word closest to ``word``, or an empty string."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


class _NotGiven:
    def __str__(self) -> str:
        return "(not given)"


NOT_GIVEN = _NotGiven()
"""What an error message shows as the value of a required field that was left out."""
