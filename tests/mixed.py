"""Small corpora of one tokenizer, to be mixed."""

from axonn_jax.files.data.prepare import prepare

LINES = {"code": "def f{n}(x): return {m}", "text": "{n} is followed by {m} in the story", "math": "{n} + {m} = ?"}


def write(folder, name, count=60, lines="", tokenizer="", holdout=0.3, **options):
    """Prepares numbered lines in a folder, by the tokenizer of another one there; returns the directory."""
    (source := folder / "src" / name).mkdir(parents=True)
    for part in range(4):
        numbered = ((lines or LINES[name]).format(n=n, m=n * n % 97) for n in range(part, count, 4))
        (source / f"{part}.txt").write_text("\n".join(numbered))
    given = {"tokenizer": folder / tokenizer} if tokenizer else options
    prepare(source, folder / name, include=["*.txt"], holdout=holdout, **given)
    return folder / name
