"""Says whether the demo's model learned more than word frequencies, and where to look next."""

import sys
from pathlib import Path

from axonn_jax.run.tracking.records import read_metrics


def main(run: Path) -> int:
    """Prints the verdict; 1 where the held-out loss is not below the unigram entropy."""
    last = next(r for r in reversed(read_metrics(run)) if "eval_loss" in r)
    loss, entropy = last["eval_loss"], last["unigram_entropy"]
    print(f"demo: held-out loss {loss:.3f}, unigram entropy {entropy:.3f} nats a token")
    print(f"demo: the picture is {run / 'loss.png'}, the figures {run / 'metrics.jsonl'}")
    print(f"demo: what each stage did and when: {run / 'timeline.png'}; {run / 'timeline.json'} opens in Perfetto")
    if loss >= entropy:
        print("demo: FAILED: the model knows no more than how often each token occurs", file=sys.stderr)
        return 1
    print(f"demo: more texts: .venv/bin/axonn-jax generate {run} --prompt 'class Test' --tokens 100")
    print("demo: the same on two processes:")
    print(
        "  .venv/bin/mpirun --bind-to none -n 2 .venv/bin/axonn-jax train examples/demo.toml "
        "--grid.pipe 2 --grid.x 1 --log.dir runs/two"
    )
    return 0


sys.exit(main(Path(sys.argv[1])))
