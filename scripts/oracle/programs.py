"""Programs that XLA has compiled in this process, told by what they compute and not by names of Python."""

import gc
import hashlib
import re
from collections import Counter

import jax

SMALLEST = 100
"""Lines from which a program counts; smaller ones are single operations outside of any step."""
_METADATA = re.compile(r'(?:, )?metadata=\{(?:"(?:[^"\\]|\\.)*"|[^"{}]|\{[^{}]*\})*\}')
_NAME = re.compile(r"%[\w.\-]+")
_HEADER = re.compile(r"^HloModule [^,\s]+")
_BODY = re.compile(r"^(?=%|ENTRY )", re.MULTILINE)


def without_names(text: str) -> str:
    """Return HLO text without metadata, tables of source lines, and with numbers for names, by first appearance."""
    head, _, _ = text.partition("\n")
    start = _BODY.search(text)
    text = _HEADER.sub("HloModule", head) + "\n" + (text[start.start() :] if start else "")
    numbers: dict[str, str] = {}
    return _NAME.sub(lambda found: numbers.setdefault(found[0], f"%{len(numbers)}"), _METADATA.sub("", text))


class Programs:
    """The programs that appear from the construction on."""

    def __init__(self) -> None:
        forget()
        self._before = Counter(live())

    def told(self) -> list[str]:
        """Return a line a program, as `live` does."""
        return sorted((Counter(live()) - self._before).elements())


def forget() -> None:
    """Free the programs that nothing uses, and keep the collector from freeing others at its own time."""
    gc.enable()
    jax.clear_caches()
    gc.collect()
    gc.disable()


def live() -> list[str]:
    """Return a line a program: hash, lines, and bytes of arguments, results and temporaries."""
    found = []
    for program in jax.devices()[0].client.live_executables():
        text = "\n".join(without_names(module.to_string()) for module in program.hlo_modules())
        if (lines := text.count("\n")) < SMALLEST:
            continue
        memory, digest = program.get_compiled_memory_stats(), hashlib.sha256(text.encode()).hexdigest()[:16]
        found.append(
            f"{digest}: {lines} lines, arguments {memory.argument_size_in_bytes}, results "
            f"{memory.output_size_in_bytes}, temporaries {memory.temp_size_in_bytes} bytes"
        )
    return sorted(found)
