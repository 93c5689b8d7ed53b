"""`axonn-jax train` that also writes down, a line a batch, the sample numbers that this process drew for training."""

import json
import os
import sys

from axonn_jax.cli.main import main
from axonn_jax.files.data.loader import Loader

folder, *words = sys.argv[1:]
draw = Loader.__next__


def drawing(self):
    batch = draw(self)
    if self.position > 0 and self.shuffles:
        taken = (self.position - self.first) // self.batch - 1
        numbers = self.samples(taken)
        with open(os.path.join(folder, f"{os.getpid()}"), "a") as out:
            out.write(json.dumps(numbers) + "\n")
    return batch


made = Loader.__init__


def making(self, *args, **options):
    made(self, *args, **options)
    self.shuffles, self.first, self.batch = options.get("shuffle", True), self.position, options["global_batch"]


Loader.__init__, Loader.__next__ = making, drawing
sys.exit(main(["train", *words]))
