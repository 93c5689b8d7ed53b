"""A benchmark worker that fine-tunes on instructions: `worker_instructions.py packed|padded|torch --weights DIR`.

All three train the same model on the same documents and targets, from the same weights, with AdamW in float32.
"""

import os
import sys
from dataclasses import dataclass

from workers import pin, serve

if __name__ == "__main__":
    pin()

import numpy as np

SIZES = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
SEQ, ROWS, MICROBATCHES, DOCUMENTS = 512, 16, 8, 1 << 12


@dataclass(frozen=True)
class Step:
    """Documents of a step, in rows of a packing made ahead: ids, and the first token that is an answer's."""

    rows: list[list[tuple[np.ndarray, int]]]

    @property
    def documents(self) -> list[tuple[np.ndarray, int]]:
        """All documents."""
        return [document for row in self.rows for document in row]

    @property
    def targets(self) -> int:
        """Targets that count."""
        return sum(len(ids) - answer for ids, answer in self.documents)

    @property
    def fill(self) -> float:
        """Share of the rows that is documents."""
        return sum(len(ids) for ids, _ in self.documents) / (ROWS * (SEQ + 1))


def step_of() -> Step:
    """The step: rows drawn from a packing of documents whose lengths are as skewed as those of instruction data."""
    from axonn_jax.data.instructions.pack import MarkedTokens, Packer

    draw, packer = np.random.default_rng(0), Packer(SEQ + 1)
    packed: list[list[MarkedTokens]] = []
    lengths = draw.lognormal(4.2, 0.9, DOCUMENTS).astype(int).clip(12, SEQ + 1)
    for length in lengths:
        ids = draw.integers(1, SIZES["vocab_size"], length).astype(np.uint32)
        packed += packer.add(MarkedTokens(ids, np.arange(length) >= length * 2 // 5, 0))
    chosen = draw.choice(len(packed), ROWS, replace=False)
    return Step([[(each.ids.astype(np.int64), int(each.counts.argmax())) for each in packed[at]] for at in chosen])


def ours(step: Step, folder: str, *, packed: bool) -> None:
    """Serve steps of axonn_jax, on packed rows or on a document a row, padded to the longest."""
    import optax
    from flax import nnx

    import axonn_jax as ax

    def counts(ids: np.ndarray, answer: int) -> list[bool]:
        return (np.arange(len(ids)) >= answer).tolist()

    if packed:
        batch = np.stack(
            [ax.models.pack([i for i, _ in row], SEQ + 1, [counts(*one) for one in row]) for row in step.rows]
        )
    else:
        longest = max(len(ids) for ids, _ in step.documents)
        number = -(-len(step.documents) // MICROBATCHES) * MICROBATCHES
        batch = np.full((number, longest), -100, np.int64)
        for at, (ids, answer) in enumerate(step.documents):
            batch[at, : len(ids)] = ids | np.where(np.arange(len(ids)) < answer, 1 << 29, 0)
            batch[at, 0] = ids[0]
    model = ax.models.Transformer(ax.models.shape_of(folder), rngs=nnx.Rngs(0), packed=packed)
    optimizer = optax.adamw(3e-4, 0.9, 0.95, weight_decay=0.1)
    memory = ax.MemoryConfig(precision="fp32")
    trainer = ax.Trainer(model, optimizer, ax.init(), microbatches=MICROBATCHES, memory=memory)
    trainer.load(folder, weights_only=True)
    serve(lambda: float(trainer.step(batch)["loss"]))


def torch_loop(step: Step, folder: str) -> None:
    """Serve steps of the loop that TRL runs by itself: microbatches of documents, each padded to its longest."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, rope_theta=1e4))
    model.save_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, (0.9, 0.95), 1e-8, 0.1, fused=True)
    order = np.random.default_rng(1).permutation(len(step.documents))
    batches = []
    for chosen in np.array_split(order, MICROBATCHES):
        documents = [step.documents[at] for at in chosen]
        shape = (len(documents), max(len(ids) for ids, _ in documents))
        ids, mask, labels = (torch.full(shape, fill) for fill in (0, 0, -100))
        for at, (own, answer) in enumerate(documents):
            ids[at, : len(own)], mask[at, : len(own)] = torch.from_numpy(own), 1
            labels[at, answer : len(own)] = torch.from_numpy(own[answer:])
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})

    def run() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for batch in batches:
            loss = model(**batch, num_items_in_batch=step.targets).loss  # a sum over this, as TRL's trainer has it
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    serve(run)


if __name__ == "__main__":
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    kind, weights = sys.argv[1], sys.argv[sys.argv.index("--weights") + 1]
    if kind == "torch":
        torch_loop(step_of(), weights)
    ours(step_of(), weights, packed=kind == "packed")
