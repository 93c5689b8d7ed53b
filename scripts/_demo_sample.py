"""Shows how the demo's model goes on with texts that it has not seen, beside how they go on themselves."""

import re
import sys
from itertools import islice
from pathlib import Path
from textwrap import indent

from tokenizers import Tokenizer

import axonn_jax as ax
from axonn_jax.files.data.loader import TokenSamples

TOKENS, SHOWN, BEFORE = 90, 2, 160
# Not with the line's end: it is one token with the indent behind it, and a text cut between them looks like no body.
METHOD = re.compile(r"\n    def \w+\(self[^)\n]*\):(?=\n)")


def unseen(data: Path, tokenizer: Tokenizer, seq_len: int) -> list[tuple[str, str]]:
    """Return the text up to the first line of a method, and the text behind, at several places of the held-out text."""
    samples = TokenSamples(data, "valid", seq_len)
    text = tokenizer.decode([int(token) for at in range(min(len(samples), 300)) for token in samples[at][:-1]])
    places = [match for match in METHOD.finditer(text) if match.start() > BEFORE]
    cuts = (
        (text[text.index("\n", at.start() - BEFORE) + 1 : at.end()], text[at.end() : at.end() + 3 * TOKENS])
        for at in islice(places, None, None, max(len(places) // (SHOWN + 1), 1))
    )
    return [cut for cut in cuts if "<|" not in "".join(cut)][:SHOWN]


def main(data: Path, run: Path) -> None:
    """Prints each text, its own continuation and the model's."""
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    generator = ax.Generator(run, ax.init())
    texts = unseen(data, tokenizer, generator.shape.seq_len)
    prompts = [tokenizer.encode(begin).ids[TOKENS - generator.shape.seq_len :] for begin, _ in texts]
    answers = generator.generate(prompts, tokens=TOKENS, sampling=ax.Sampling(temperature=0.6, seed=1))
    for (begin, rest), (answer, *_) in zip(texts, answers, strict=True):
        print("\ndemo: a text that the model has not seen", end="")
        for title, shown in (("", begin), ("  goes on", rest), ("  and the model", tokenizer.decode(answer))):
            print(title + indent(f"\n{shown.strip(chr(10))}", "    ").rstrip())


main(*map(Path, sys.argv[1:]))
