"""Chat template of a model, by transformers: messages become text as in the model's tuning."""

from pathlib import Path
from typing import Any

from axonn_jax.errors import UserError

_ACCEPTED = "a model whose tokenizer has a chat template"


class ChatTemplate:
    """The template of a directory.

    Raises:
        UserError: the template is missing or unreadable, or transformers is not installed.
    """

    def __init__(self, directory: Path):
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise UserError("--chat", True, "an installation with transformers: pip install 'axonn_jax[hf]'") from None
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError("--chat", True, f"{_ACCEPTED}; {_line(error)}") from None
        if not self._tokenizer.chat_template:
            raise UserError("--chat", True, f"{_ACCEPTED}; {str(directory)!r} has none")

    def text(self, messages: Any) -> str:
        """Return the text of a conversation up to where the model answers.

        Args:
            messages: A list of objects with `role` and `content`, as for the template.

        Raises:
            UserError: the messages are no such list, or the template refuses.
        """
        good = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
        if not good:
            raise UserError(
                "messages", str(messages)[:80], 'a list of objects such as {"role": "user", "content": "hi"}'
            )
        try:
            text: Any = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # any exception of the template, a program of the model's makers
            raise UserError("messages", str(messages)[:80], f"what the chat template takes; {_line(error)}") from None
        return str(text)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
