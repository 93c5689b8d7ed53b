"""Bodies of functions in generated text, bare or as an answer, and texts that end behind one."""

import types

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from axonn_jax import Sampling, UserError
from axonn_jax.files.data.instructions.schemas import Conversation
from axonn_jax.files.data.instructions.templates import Alpaca
from axonn_jax.judge.continuations import continuations, requests_of
from axonn_jax.judge.forms import body_of, cut, form_of
from axonn_jax.judge.suite import problems
from axonn_jax.text.inference.slots import Continuation

PROMPT = "/* Add. */\nint add(int a, int b) {"
BODIES = {
    "  return a + b;\n}": "\nint main() { }",
    "if (a) { return b; } else { while (b) {} }\n}": " }}}",
    "// ends with a }\n  return 1;\n}": "x",
    "/* } */ return \"}\\\"}\"[0] + '}' + '\\'';\n}": " int c;",
    "return 1'000 + 0x1'f;\n}": " '}'",
}


@pytest.mark.parametrize("body", BODIES)
def test_a_body_ends_with_its_own_brace(body):
    assert cut(body + BODIES[body]) == body
    assert cut(body[:-1]) is None
    assert form_of("none", None).body(PROMPT, body + BODIES[body]) == body


ANSWERS = {
    "a function": "Here it is:\n```c++\nint add(int a, int b) {\n  return a + b;\n}\n```\nIt adds.",
    "without its first line": "```cpp\n  return a + b;\n}\n```",
    "behind another": "```\n#include <vector>\n```\nand\n```c++\nint two() { return 2; }\nint add(int a,\n int b)\n{\n"
    "  return a + b;\n}\n```",
    "behind two": "```\nmake\n```\n```c++\nint two();\n```\n```c++\nint add(int a, int b) {\n  return a + b;\n}\n```\n"
    "or\n```c++\nint add(int a, int b) {\n  return b + a;\n}\n```",
    "behind its helper": "```c++\nint add_two(int a) { return a + 2; }\n```\nand\n```c++\nint readd(int a);\n"
    "int add(int a, int b) {\n  return a + b;\n}\n```",
    "not closed": "```c++\nint add(int a, int b) {\n  return a + b;\n}\nint main() {}",
    "without a fence": "int add(int a, int b) {\n  return a + b;\n}",
}


@pytest.mark.parametrize("case", ANSWERS)
def test_the_body_of_an_answer(case):
    form = form_of("alpaca", None)
    assert form.body(PROMPT, ANSWERS[case]).strip() == "return a + b;\n}"
    assert form.ended(PROMPT, ANSWERS[case]) == (case == "a function" or case.startswith("behind "))
    ends = [end for end in range(len(ANSWERS[case])) if form.ended(PROMPT, ANSWERS[case][:end])]
    for end in ends[:1]:  # nothing of the rest changes the body
        assert form.body(PROMPT, ANSWERS[case][:end]) == form.body(PROMPT, ANSWERS[case])


def test_a_body_of_nothing_is_nothing():
    assert (body_of("add", ""), body_of("", "}"), cut("")) == ("", "}", None)


@pytest.mark.parametrize("problem", problems("mini"), ids=lambda problem: problem.kind)
def test_a_request_names_the_function_and_is_in_the_form_of_the_training_data(problem):
    text = form_of("alpaca", None).text(problem.prompt("omp"))
    name = problem.signature.partition("(")[0].split()[-1]
    assert f"```\nWrite only the function {name} and no other code." in text
    user = {"role": "user", "content": text.partition("### Instruction:\n")[2].removesuffix("\n\n### Response:\n")}
    (trained,) = Alpaca().passages(Conversation([user, {"role": "assistant", "content": "ANSWER"}]), [1])
    assert text + "ANSWER" == trained.text


@pytest.mark.parametrize("template", ["none", "alpaca"])
def test_a_text_ends_behind_its_function(template):
    vocab = {"<end>": 256, **{f"<0x{byte:02X}>": byte for byte in range(256)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    body, made = "\n  return a + b;\n}", 0
    text = body if template == "none" else f"```\nmake\n```\n```c++\nint add(int a, int b) {{{body}\n```"

    def stream(requests, sampling, *, logs, until):
        nonlocal made
        for request in range(len(requests)):
            for at in range(0, 199, 4):
                piece = Continuation(
                    request, list((text + "\nint main() { }" * 9).encode()[at : at + 4]), [0.0] * 4, False
                )
                made += 4
                if until(request, piece):
                    yield piece._replace(ended=True)
                    break
                yield piece

    generator = types.SimpleNamespace(stream=stream, programs=types.SimpleNamespace(stops=()))
    form, entries = form_of(template, None), [{"prompt": PROMPT, "name": "a", "parallelism_model": "serial"}] * 2
    shape = types.SimpleNamespace(seq_len=900, vocab=257)
    requests = requests_of(entries, tokenizer, form, shape, samples=3, tokens=900)
    narrow = types.SimpleNamespace(seq_len=900, vocab=100)
    with pytest.raises(UserError, match=r"--suite = .*below model.vocab = 100; this one has 256 \(a, serial\)"):
        requests_of(entries, tokenizer, form, narrow, samples=3, tokens=900)
    rest = 900 - len(form.text(PROMPT).encode())
    assert [(request.sample, request.tokens) for request in requests] == [(at, rest) for at in range(6)]
    counts = []
    found = continuations(generator, tokenizer, entries, form, requests, Sampling(), counts.append)
    assert found == [[body] * 3] * 2
    assert counts[-1] == 6
    assert made == 6 * (len(text) + -len(text) % 4)
