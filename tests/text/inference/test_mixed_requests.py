"""Any mix of requests in few slots: each text is the one that its request has alone."""

from collections import defaultdict

import grids
import numpy as np
import pytest
from tiny import LLAMA, model

import axonn_jax as ax
from axonn_jax import GridShape, Sampling
from axonn_jax.text.inference.generator import Request

WARM = Sampling(temperature=1.3, top_k=0, top_p=0.95, seed=3)
SIZES = {**LLAMA, "seq_len": 330}
CASES = {
    "all": (SIZES, 256),  # tokens that a cache has room for at first
    "window": ({**SIZES, "window": 40}, 64),
    "ring": ({**SIZES, "window": 64}, 64),
}


def mixed(rng, count, capacity, length):
    """Requests whose prompts begin alike or are equal, half of which end around the cache's end; it grows late."""
    base = rng.integers(0, 97, (2, 20)).tolist()
    pool = [tuple(base[rng.integers(2)][: rng.integers(1, 20)]) for _ in range(max(4, count // 20))]
    for number in range(count):
        prompt = pool[rng.integers(len(pool))]
        beyond = rng.integers(-1, 2 if number > count // 2 else 1)
        tokens = capacity - len(prompt) + 1 + beyond if rng.integers(2) else rng.integers(1, 40)
        yield Request(prompt, min(int(tokens), length - len(prompt)), int(rng.integers(2)))


def alone(generator, requests):
    """Texts of requests by prompt and sample, the longest of each, one after the other."""
    longest = defaultdict(int)
    for prompt, tokens, sample in requests:
        longest[prompt, sample] = max(tokens, longest[prompt, sample])
    texts = {}
    for (prompt, sample), tokens in longest.items():
        texts[prompt, sample] = [
            t for piece in generator.stream([Request(prompt, tokens, sample)], WARM) for t in piece.ids
        ]
    return texts


@pytest.mark.parametrize(
    ("case", "axes", "slots", "count"),
    [
        ("all", GridShape(), 3, 40),
        ("ring", GridShape(), 3, 40),
        *(pytest.param(case, GridShape(), 3, 500, marks=pytest.mark.slow) for case in CASES),
        *(pytest.param(case, GridShape(data=2, y=2), 4, 500, marks=pytest.mark.slow) for case in CASES),
    ],
    ids=lambda value: grids.name(value) if isinstance(value, GridShape) else str(value),
)
def test_any_mix_equals_each_alone(case, axes, slots, count):
    sizes, capacity = CASES[case]
    made, rng = model(**sizes), np.random.default_rng(0)
    requests = list(mixed(rng, count, capacity, sizes["seq_len"]))
    wanted = alone(ax.Generator(made, grids.lay(GridShape()), slots=1), requests)
    generator = ax.Generator(made, grids.lay(axes), slots=slots)
    while requests:  # in streams, of which a few are given up
        size = int(rng.integers(3, 30))
        part, requests = requests[:size], requests[size:]
        texts, pieces = [[] for _ in part], int(rng.integers(1, 3 * size))
        stream = generator.stream(part, WARM)
        for number, piece in enumerate(stream):
            texts[piece.request] += piece.ids
            if size % 4 == 0 and number == pieces:
                stream.close()
                break
        for own, text in zip(part, texts, strict=True):
            end = own.tokens if size % 4 else len(text)
            assert text == wanted[own.prompt, own.sample][:end]
