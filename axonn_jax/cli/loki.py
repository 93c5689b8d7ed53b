"""``axonn-jax loki``: calibration of Loki attention with the principal components of a model's keys."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from axonn_jax.cli.arguments import Arg, Positive
from axonn_jax.core.documents import new_figure, save_picture
from axonn_jax.core.errors import UserError, refused
from axonn_jax.core.grid import GridShape
from axonn_jax.core.terminal import Ticker, libraries_on_stderr, say, table

if TYPE_CHECKING:
    from axonn_jax.text.loki.components import Components

_MIN_TOKENS_PER_FEATURE = 10  # with fewer the components are warned about
_ROWS = 4


@dataclass(frozen=True)
class Loki:
    """Calibrate Loki attention (NeurIPS 2024): principal components of the keys of every layer and head.

    Writes RUN_DIR/loki.safetensors, for `axonn-jax generate RUN_DIR --attention loki`, and prints how many components
    hold 90 % of the variance.
    """

    run_dir: Annotated[Path, Arg(positional="RUN_DIR")]
    """A directory left by `axonn-jax train` or `convert`, or a Hugging Face model's."""
    data: Path
    """Directory from `axonn-jax prepare`, with the model's tokenizer; the validation split is read."""
    tokens: Positive = 200_000
    """Number of tokens to read at most."""
    seq_len: Annotated[int | None, Arg(default="model.seq_len", least=2)] = None
    """Tokens of a sequence."""
    keys: Literal["post", "pre"] = "post"
    """Keys of the components: after rotation (post) or before (pre). Ranked are rotated keys in any case."""
    plot: bool = False
    """Draw RUN_DIR/loki.png: ranks by layer."""
    grid: GridShape = field(default_factory=GridShape)
    json: bool = False
    """Print one JSON object."""


def run(args: Loki) -> int:
    """Calibrate, write the file and print the ranks, on the first process of a run.

    Raises:
        UserError: RUN_DIR or the data cannot be used, or their vocabularies differ.
    """
    import numpy as np

    from axonn_jax.core.tensor.kernel_choice import EVERY_TOKEN
    from axonn_jax.files.data.loader import TokenSamples
    from axonn_jax.files.huggingface.pretrained import shape_of
    from axonn_jax.text.inference.weights import check_grid, of_run

    check_grid(args.grid)
    shape = shape_of(args.run_dir, "RUN_DIR")
    shape.check_grid(args.grid)
    if (rule := shape.attention_rule(0)) != EVERY_TOKEN:
        raise UserError("RUN_DIR", str(args.run_dir), f"a model without {rule}")
    length = args.seq_len or shape.seq_len
    if length > shape.seq_len:
        raise UserError("--seq-len", length, f"at most model.seq_len = {shape.seq_len}")
    try:
        samples = TokenSamples(args.data, "valid", length)
    except UserError as error:
        field = "--seq-len" if error.field == "model.seq_len" else "--data"
        raise UserError(field, error.value, error.accepted) from None
    if samples.manifest.packed:
        raise UserError("--data", str(args.data), "a stream of text; this is rows (`prepare --instructions`)")
    check_tokenizer(args, samples.manifest.used, shape.vocab)
    rows = -(-_ROWS // args.grid.batch_shards) * args.grid.batch_shards
    count = min(args.tokens // length, len(samples)) // rows
    if not count:
        accepted = f"at least {rows * length}: {rows} sequences of {length}"
        if len(samples) < rows:
            accepted = f"{accepted}, of which the validation split of {args.data} has {len(samples)}; see --seq-len"
        raise UserError("--tokens", args.tokens, accepted)

    from axonn_jax.core.distributed.initialize import start
    from axonn_jax.text.loki import components

    target = args.run_dir / components.FILE
    if target.is_dir() or not os.access(args.run_dir, os.W_OK):
        raise UserError("RUN_DIR", str(args.run_dir), f"a directory in which {components.FILE} can be written")
    with libraries_on_stderr():
        _, grid = start(args.grid)
    loaded = of_run(args.run_dir, grid, "float32", warn=say)
    with Ticker("calibrating") as ticker:

        def batches() -> "Iterator[np.ndarray]":
            for batch in range(count):
                ticker.now("calibrating", count * rows, "sequences", batch * rows)
                yield np.stack([samples[batch * rows + row][:-1] for row in range(rows)])

        program = components.moments(loaded.parts, grid.mesh, "float32")
        try:
            calibrated = components.calibrate(program, loaded.params, batches())
        except np.linalg.LinAlgError:  # keys that are not finite
            raise UserError("RUN_DIR", str(args.run_dir), "weights that give finite keys") from None
    selected = calibrated[args.keys]
    weights = components.fingerprint(loaded.parts, loaded.params, shape.kv_heads)
    # All processes compute the components and the fingerprint; only the first one writes and prints.
    if grid.rank:
        return 0
    if selected.tokens < _MIN_TOKENS_PER_FEATURE * shape.head_dim:
        say(f"warning: {selected.tokens} tokens are few for {shape.head_dim} features; --tokens")
    with refused("RUN_DIR", args.run_dir, f"room for {components.FILE}"):
        components.save(selected, target, shape, weights, args.keys)
    if args.plot:
        draw(calibrated, shape.head_dim, args.run_dir / "loki.png")
    ranks = {kind: of_kind.ranks().tolist() for kind, of_kind in calibrated.items()}
    if args.json:
        print(json.dumps({"path": str(target), "tokens": selected.tokens, "head_dim": shape.head_dim, "ranks": ranks}))
        return 0
    heads = ["layer", "after rotation", "before rotation"]
    lines = [[str(at), *(_span(ranks[kind][at]) for kind in ("post", "pre"))] for at in range(shape.layers)]
    print("\n".join(table(heads, lines)))
    print(f"components that hold 90 % of the variance, of {shape.head_dim}; {selected.tokens:,} tokens; {target}")
    return 0


def check_tokenizer(args: Loki, used: int, vocab: int) -> None:
    """Raise ``UserError`` if the data were prepared with another tokenizer than RUN_DIR's."""
    from axonn_jax.files.data.tokenize import load

    if used > vocab:
        raise UserError("--data", str(args.data), f"tokens below model.vocab = {vocab}; the largest is {used - 1}")
    model_file, data_file = args.run_dir / "tokenizer.json", args.data / "tokenizer.json"
    if model_file.exists() and load(model_file, "RUN_DIR").get_vocab() != load(data_file, "--data").get_vocab():
        accepted = f"tokens of RUN_DIR's tokenizer: axonn-jax prepare SOURCE DATA_DIR --tokenizer {args.run_dir}"
        raise UserError("--data", str(args.data), accepted)


def _span(ranks: list[int]) -> str:
    return str(ranks[0]) if min(ranks) == max(ranks) else f"{min(ranks)} to {max(ranks)}"


def draw(calibrated: "dict[str, Components]", head_dim: int, path: Path) -> None:
    """Draw the ranks at 90 % of the variance by layer, per head and their mean.

    Args:
        calibrated: Components by the kind of keys, `post` and `pre`.
        head_dim: Features of a head.
        path: PNG file to write.

    Raises:
        UserError: The file cannot be written.
    """
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(6, 3.5)
    axes = figure.subplots()
    # Shift the points and dash the second line, since the ranks of both kinds are often equal.
    for kind, words, color, dashes, shift in (("post", "after", "C0", "-", -0.06), ("pre", "before", "C1", "--", 0.06)):
        ranks = calibrated[kind].ranks()
        layers = [layer + shift for layer in range(len(ranks))]
        for head in range(ranks.shape[1]):
            axes.plot(layers, ranks[:, head], ".", color=color, alpha=0.4)
        axes.plot(layers, ranks.mean(1), linestyle=dashes, color=color, label=f"{words} rotation")
    axes.axhline(head_dim, color="0.5", linestyle=":", label="features of a head")
    axes.set(xlabel="layer", ylabel="components that hold 90 %", ylim=(0, head_dim * 1.08))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    try:
        save_picture(figure, path)
    except OSError as error:
        raise UserError("--plot", str(path), f"a file that can be written; {error}") from None
