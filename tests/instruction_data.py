"""Instruction data that tests share: a tokenizer with a chat template, rows of uneven lengths, packed documents."""

import json
import random
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from axonn_jax.files.data.instructions.write import InstructionOptions, prepare_instructions
from axonn_jax.files.data.loader import TokenSamples

CHATML = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'odd' %}{{ raise_exception('no such role') }}"
    "{% endif %}{% if message['role'] == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ message['content'] }}"
    "<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ("the", "grid", "of", "a", "mesh", "and", "its", "batch", "weight", "shard", "token", "int", "return")
INTRO = "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
INTRO += "response that appropriately completes the request.\n\n### Instruction:\n\n\n### Input:\n\n\n### Response:\n"
TALK = [
    {"role": "user", "content": "int  x"},
    {"role": "assistant", "content": "  return  x;\n  é🙂 the grid"},
    {"role": "user", "content": "and the mesh"},
    {"role": "assistant", "content": "its token\n"},
]
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def tokenizer(folder: Path, *, template: str | list | None = CHATML, trim: bool = False, spaces: bool = False) -> Path:
    """A directory with a BPE whose post-processor adds <s>; its pieces are of bytes, or of letters and a metaspace."""
    made = Tokenizer(models.BPE(unk_token="<unk>" if spaces else None))
    if spaces:
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=trim)
        made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*SPECIAL, "<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([INTRO, " ".join(WORDS), "int  x =  1;\n    return  x;\n"] * 50, trainer)
    begin = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
    bytes_too = [processors.ByteLevel(trim_offsets=True)] if trim else []
    made.post_processor = processors.Sequence([*bytes_too, begin])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|endoftext|>"}
    settings |= {"unk_token": "<unk>"} if template is None else {"unk_token": "<unk>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


def rows(count: int, seed: int = 0) -> list[dict]:
    """Rows of all three schemas, most of them short and some long."""
    draw = random.Random(seed)
    made: list[dict] = []
    for number in range(count):
        long = 2 + min(int(draw.lognormvariate(1.2, 1.0)), 40)
        asked, answered = text(draw, 3), text(draw, long)
        made.append(
            [
                {"instruction": asked, "input": text(draw, 2) if number % 2 else None, "output": answered, "lang": "c"},
                {"prompt": asked, "completion": answered},
                {
                    "messages": [
                        {"role": "user", "content": asked},
                        {"role": "assistant", "content": answered},
                        {"role": "user", "content": text(draw, 2)},
                        {"role": "assistant", "content": text(draw, 3)},
                    ]
                },
            ][number % 3]
        )
    return made


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def prepared(folder: Path, lines: list[dict], tokenizer: Path, seq_len: int, holdout: float = 0.3, **options):
    """The manifest and the notes of rows that are written and prepared into a folder's `out`."""
    given = (
        write(folder / "data.jsonl", lines),
        folder / "out",
        InstructionOptions(seq_len, **{"template": "alpaca"} | options),
    )
    return prepare_instructions(*given, tokenizer=tokenizer, holdout=holdout, force=True)


def documents(words):
    """Ids and marks of the documents of a row, by the bits of its words."""
    starts = [at for at, word in enumerate(words) if word < 0] + [len(words)]
    assert starts[0] == 0
    return [
        ([int(word) & 0xFFFFFF for word in words[a:b]], [bool(int(word) >> 30 & 1) for word in words[a:b]])
        for a, b in pairwise(starts)
    ]


def all_documents(manifest, seq):
    """Every document of both splits but padding, as its ids, and what counts in it."""
    found = []
    for split in ("train", "valid"):
        samples = TokenSamples(manifest.path, split, seq, verify=True)
        for row in range(len(samples)):
            found += [(tuple(ids), tuple(marks)) for ids, marks in documents(samples[row]) if any(marks)]
    return found
