"""`generate --chat`: the ids are those of transformers' own chat template."""

import json
import sys

import pytest
import transformers
from commands import refusal
from tokenizers import Tokenizer, processors

from axonn_jax.cli.generate import Generate
from axonn_jax.cli.generate.texts import prompts_of
from axonn_jax.core.errors import UserError
from axonn_jax.files.data.instructions.schemas import Conversation
from axonn_jax.files.data.instructions.templates import Alpaca
from axonn_jax.files.data.tokenize import load

CHATML = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'odd' %}{{ raise_exception('no such role') }}"
    "{% endif %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "line one <|im_end|>"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "line two"},
]


@pytest.fixture
def chat_dir(run_dir):
    """A run directory with a tokenizer that has a template, and a post-processor that would add a second <s>."""
    tokenizer = Tokenizer.from_file(str(run_dir / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.save(str(run_dir / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"}
    (run_dir / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHATML}))
    return run_dir


def ids(folder, **options):
    given = prompts_of(Generate(folder, chat=True, **options), load(folder / "tokenizer.json"), 4096, 1 << 20)
    assert [prompt.text for prompt in given] == [""] * len(given)
    return [list(prompt.ids) for prompt in given]


def test_ids_are_those_of_transformers(chat_dir, tmp_path):
    theirs = transformers.AutoTokenizer.from_pretrained(chat_dir)

    def wanted(messages):
        return theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    user = [{"role": "user", "content": "line one"}]
    assert ids(chat_dir, prompt="line one") == [wanted(user)]
    lines = [{"prompt": "line one", "id": 3}, {"messages": TALK}]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ids(chat_dir, prompts=tmp_path / "talks.jsonl") == [wanted(user), wanted(TALK)]
    assert wanted(user).count(theirs.bos_token_id) == 1


def test_another_template_than_the_models_own_on_request(chat_dir, tmp_path, capsys):
    (tmp_path / "other.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>")
    tokenizer = load(chat_dir / "tokenizer.json")
    asked = {"prompt": "line one", "template": str(tmp_path / "other.jinja")}
    assert ids(chat_dir, **asked) == [tokenizer.encode("<user>line one<answer>", add_special_tokens=False).ids]
    talk = TALK[1:]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    (got,) = ids(chat_dir, prompts=tmp_path / "talk.jsonl", template="alpaca")
    answered = Conversation([*talk, {"role": "assistant", "content": ""}])
    passages = Alpaca().passages(answered, ())
    assert tokenizer.decode(got, skip_special_tokens=False) == "<|im_end|>".join(passage.text for passage in passages)
    prompt = ("generate", chat_dir, "--prompt", "x", "--template")
    assert "--template = 'alpaca': --chat beside it" in refusal(capsys, *prompt, "alpaca")
    says = "--template = 'alpca': alpaca, chat or FILE.jinja; did you mean 'alpaca'?"
    assert says in refusal(capsys, *prompt, "alpca", "--chat")
    says = "--template = 'none.jinja': a file in jinja that can be read"
    assert says in refusal(capsys, "evaluate", chat_dir, "--execute", "--template", "none.jinja")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"messages": []}, "a list of objects such as"),
        ({"messages": "hello"}, "a list of objects such as"),
        ({"messages": [{"role": "odd", "content": "x"}]}, "what the chat template takes; no such role"),
        ({"text": "x"}, 'an object whose "prompt" is a text, or one with "messages"'),
    ],
)
def test_a_conversation_of_no_use_names_its_line(chat_dir, tmp_path, line, says):
    (tmp_path / "talks.jsonl").write_text('{"prompt": "good"}\n' + json.dumps(line) + "\n")
    with pytest.raises(UserError, match=r"--prompts = '.*talks\.jsonl, line 2'") as caught:
        ids(chat_dir, prompts=tmp_path / "talks.jsonl")
    assert says in str(caught.value)


def test_without_a_template_it_is_one_line(run_dir, capsys):
    line = refusal(capsys, "generate", run_dir, "--prompt", "x", "--chat")
    assert "--chat = True: a model whose tokenizer has a chat template" in line


def test_without_jinja_it_is_one_line(chat_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UserError, match=r"^--chat = True: an installation with jinja2: pip install 'axonn_jax\[hf\]'$"):
        ids(chat_dir, prompt="x")
