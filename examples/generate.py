"""Texts of a trained model from a script of one's own: `python examples/generate.py RUN_DIR PROMPT... [--grid.y 2]`.

Continues every prompt twice, and scores it: how likely the model finds what stands there. RUN_DIR is what
`axonn-jax train` or `convert` left; docs/generation.md says what a text depends on.
"""

import argparse
from pathlib import Path

import axonn_jax as ax
from axonn_jax.files.data.tokenize import load


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--tokens", type=int, default=24)
    for axis in ("data", "y", "x"):
        parser.add_argument(f"--grid.{axis}", dest=axis, type=int, default=1)
    args = parser.parse_args()

    grid = ax.init(data=args.data, y=args.y, x=args.x)  # any grid, whatever the model was trained on
    tokenizer = load(args.run_dir / "tokenizer.json")
    generator = ax.Generator(args.run_dir, grid, slots=4 * args.data, limit=tokenizer.get_vocab_size())

    prompts = [tokenizer.encode(prompt).ids for prompt in args.prompts]
    texts = generator.generate(prompts, tokens=args.tokens, sampling=ax.Sampling(temperature=0.8, seed=1), samples=2)
    scores = generator.score([ids for ids in prompts if len(ids) > 1])  # every token but the first, given those before
    if grid.rank:
        return
    for prompt, continuations in zip(args.prompts, texts, strict=True):
        for ids in continuations:
            print(repr(prompt + tokenizer.decode(ids)))
    for log_probabilities in scores:
        print(f"{-log_probabilities.mean():.4f} nats a token over {len(log_probabilities)} tokens")


if __name__ == "__main__":
    main()
