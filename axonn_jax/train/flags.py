"""Command-line flags with dotted names as names and values."""

from collections.abc import Collection, Sequence

from axonn_jax.errors import NOT_GIVEN, UserError

_WORDS = {"true": True, "True": True, "false": False, "False": False}


def read_flags(
    argv: Sequence[str], texts: Collection[str] = (), switches: Collection[str] = ()
) -> tuple[list[str], list[tuple[str, object]]]:
    """Returns the arguments that belong to no flag, and every flag's dotted name with its value, in order.

    The value of a flag named in `texts` is kept as it is; of others, it is a number or a boolean where it reads as
    one. A flag named in `switches` is true where no value follows; any other then has the value `NOT_GIVEN`.

    Raises:
        UserError: an argument starts with a single dash.
    """
    rest: list[str] = []
    flags: list[tuple[str, object]] = []
    words = list(reversed(argv))
    while words:
        word = words.pop()
        if not word.startswith("--"):
            if word.startswith("-"):
                raise UserError("flag", word, f"flags start with two dashes, as in --{word.lstrip('-')}")
            rest.append(word)
            continue
        name, equals, text = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        value: object = NOT_GIVEN
        # A switch in front of the config file takes no value: what follows it is the file.
        file_next = name in switches and bool(words) and words[-1].endswith(".toml")
        if not equals and words and not words[-1].startswith("--") and not file_next:
            equals, text = "=", words.pop()
        if equals:
            value = text if name in texts else _scalar(text)
        elif name in switches:
            value = True
        flags.append((name, value))
    return rest, flags


def _scalar(text: str) -> object:
    if text in _WORDS:
        return _WORDS[text]
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            pass
    return text
