"""A benchmark worker that continues random prompts with a 110M Llama: `ours|transformers MODEL_DIR`.

`transformers` makes the model first where there is none. Orders are `decode BATCH ROUND`, `prefill ROUND` and, of ours,
`window ROUND` (every token from the whole window anew, as without a cache), `static ROUND` and `continuous ROUND`. The
answer has the seconds, the tokens that came of them and a checksum of these.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workers import pin

pin()

import numpy as np

VOCAB, DECODED, LONG, WINDOW, SLOTS = 32_000, 64, 1024, 512, 16
Generate = Callable[[list[list[int]], int], list[list[int]]]
"""Prompts of one length and how many tokens to add -> those that were added."""


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Random ones."""
    drawn = np.random.default_rng(seed).integers(1, VOCAB, (count, length))
    return [row.tolist() for row in drawn]


def skewed(seed: int) -> list[tuple[list[int], int]]:
    """64 prompts of 8 to 256 tokens with 8 to 256 to add: most are short, some are long."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(np.log(8), np.log(256), (64, 2))).astype(int)
    return [(rng.integers(1, VOCAB, length).tolist(), int(tokens)) for length, tokens in sizes]


def theirs(path: Path) -> tuple[Generate, dict[str, Any]]:
    """Transformers' `generate` with its cache, in PyTorch."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not (path / "config.json").is_file():
        config = transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
            num_key_value_heads=12, max_position_embeddings=2048, tie_word_embeddings=True,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    def generate(given: list[list[int]], tokens: int) -> list[list[int]]:
        ids = torch.tensor(given)
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        return [list(map(int, row)) for row in made[:, ids.shape[1] :]]

    return generate, {}


def ours(path: Path, *joined: str) -> tuple[Generate, dict[str, Any]]:
    """`ax.Generator`; `joined` are rank and port of two processes with `y = 2`."""
    import jax
    import jax.numpy as jnp

    import axonn_jax as ax
    from axonn_jax.inference.generator import Request
    from axonn_jax.inference.programs import logits

    several = {}
    if joined:
        several = {"y": 2, "coordinator": f"127.0.0.1:{joined[1]}", "num_processes": 2, "process_id": int(joined[0])}
    grid = ax.init(**several)  # type: ignore[arg-type]
    one, many = (ax.Generator(path, grid, slots=slots, length=1536, stops=()) for slots in (1, SLOTS))
    many.params = one.params
    greedy = ax.Sampling(temperature=0)

    def generate(given: list[list[int]], tokens: int) -> list[list[int]]:
        generator = one if len(given) == 1 else many
        return [samples[0] for samples in generator.generate(given, tokens=tokens, sampling=greedy)]

    def made(requests: list[tuple[list[int], int]]) -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in requests]
        for piece in many.stream([Request(tuple(prompt), tokens) for prompt, tokens in requests], greedy):
            texts[piece.request] += piece.ids
        return texts

    def static(requests: list[tuple[list[int], int]]) -> list[list[int]]:
        batches = [requests[at : at + SLOTS] for at in range(0, len(requests), SLOTS)]
        return [text for batch in batches for text in made(batch)]

    parts = one.programs.parts
    whole = jax.jit(lambda params, ids: jnp.argmax(logits(parts, grid.mesh, params, ids)[0, -1]))

    def window(given: list[int], tokens: int) -> list[list[int]]:
        ids = list(given)
        for _ in range(tokens):
            ids.append(int(whole(one.params, np.array([ids[-WINDOW:]]))))
        return [ids[len(given) :]]

    return generate, {"continuous": made, "static": static, "window": window}


def bandwidth() -> float:
    """Bytes a second that this core reads of a large float32 matrix in numpy's product with a vector."""
    matrix, vector = np.ones((32_768, 4096), np.float32), np.ones(4096, np.float32)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        matrix @ vector
        seconds.append(time.perf_counter() - began)
    return matrix.nbytes / min(seconds)


def main() -> None:
    """Serves orders."""
    kind, path, *joined = sys.argv[1:]
    generate, further = theirs(Path(path)) if kind == "transformers" else ours(Path(path), *joined)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order, *numbers = line.split()
        seed = int(numbers[-1])
        if order == "bandwidth":
            print(json.dumps({"bandwidth": bandwidth()}), flush=True)
            continue
        given: Any = prompts(int(numbers[0]), 16, seed) if order == "decode" else prompts(1, LONG, seed)
        given = skewed(seed) if order in ("static", "continuous") else given
        began = time.perf_counter()
        if order in ("decode", "prefill"):
            texts = generate(given, DECODED if order == "decode" else 1)
        else:
            texts = further[order](*((given[0], 2) if order == "window" else (given,)))
        seconds = time.perf_counter() - began
        ids = [token for text in texts for token in text]
        checksum = int(np.dot(ids, np.arange(1, len(ids) + 1)))
        print(json.dumps({"seconds": seconds, "tokens": len(ids), "checksum": checksum}), flush=True)
    os._exit(0)


main()
