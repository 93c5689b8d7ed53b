"""Special tokens that a chat template names: the texts that transformers gives it, whatever the files say of each."""

import json

import instruction_data
import pytest
import transformers

from axonn_jax.data.instructions.chat import ChatTemplate

NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "image_token", "tool_token", "add_bos_token")
TEMPLATE = "{{ messages[0].content }}" + "".join(f"|{{{{ {name} }}}}" for name in NAMES)
OBJECT = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
OTHER = {"bos_token": "<b>", "eos_token": {"content": "<e>", **OBJECT}, "pad_token": None}
LISTED = {"added_tokens_decoder": {"1": {"content": "<|im_start|>", "special": True, **OBJECT}}}
CASES = {
    "one file": ({}, {}),
    "the map wins": ({}, {"special_tokens_map": OTHER}),
    "not where tokens are listed": (LISTED, {"special_tokens_map": OTHER}),
    "nor by null": (LISTED | {"bos_token": None}, {"special_tokens_map": OTHER}),
    "the map alone": ({"bos_token": None, "eos_token": None}, {"special_tokens_map": OTHER}),
    "objects": ({"eos_token": {"__type": "AddedToken", "content": "<e>", **OBJECT}}, {}),
    "added tokens alone": ({"eos_token": "<e>"}, {"added_tokens": {"<e>": 500}}),
    "both": ({"eos_token": "<x>"}, {"added_tokens": {"<e>": 500}, "special_tokens_map": OTHER}),
    "others by name": ({"image_token": "<i>", "add_bos_token": True}, {}),
    "extra by name": ({"extra_special_tokens": {"image_token": "<i>", "tool_token": "<t>"}}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_special_tokens_are_those_of_transformers(tmp_path, case):
    settings, files = CASES[case]
    folder = instruction_data.tokenizer(tmp_path / "t", template=TEMPLATE)
    given = json.loads((folder / "tokenizer_config.json").read_text())
    for name, content in {"tokenizer_config": given | {"pad_token": "<p>"} | settings, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    talk = [{"role": "user", "content": "x"}]
    want = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(talk, tokenize=False)
    assert ChatTemplate.of(folder, "--chat", True).text(talk, answers=False) == want
