"""Exception for a user's mistake, and the checks that raise it."""

import inspect
import operator
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cache, partial, wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

P = ParamSpec("P")
T = TypeVar("T")


class UserError(ValueError):
    """Bad input: one line with the name of a setting, argument or file, its value, and what would be accepted.

    The command line prints the line without a traceback and exits with status 2.
    """

    def __init__(self, field: str, value: object, accepted: str):
        self.field, self.value, self.accepted = field, value, accepted
        line = f"{_short(field)} = {_short(_shown(value))}: {' '.join(accepted.split())}"
        super().__init__(without_credentials(line))


_MOST = 300  # characters of a field or value in an error; a file may contain texts of any length
_CLOSE = 0.65  # similarity that a suggestion needs (`difflib`): mpi and mpi4py are close, gpt_oss and gpt2 are not

_NAMES_ELSEWHERE = {
    "pipe": "pp g_inter pipeline_model_parallel_size pipeline_parallel_degree",
    "data": "dp g_data data_parallel_replicate_degree ici_data_parallelism dcn_data_parallelism",
    "z": "fsdp data_parallel_shard_degree ici_fsdp_parallelism",
    "y": "tp tensor_model_parallel_size tensor_parallel_degree ici_tensor_parallelism",
    "expert": "ep expert_model_parallel_size",
    "global_batch": "batch_size local_batch_size per_device_batch_size per_device_train_batch_size global_batch_size",
    "microbatches": "gradient_accumulation_steps grad_accum micro_batch_size",
    "steps": "max_steps train_iters", "epochs": "num_train_epochs num_epochs", "eval_every": "eval_interval eval_steps",
    "checkpoint.every": "save_interval save_steps save_every interval", "lr": "learning_rate", "min_lr_ratio": "min_lr",
    "warmup": "warmup_steps lr_warmup_iters", "schedule": "lr_decay_style lr_scheduler_type", "ema": "ema_decay",
    "clip": "clip_grad max_grad_norm grad_clip", "layers": "num_layers num_hidden_layers n_layer n_layers",
    "hidden": "hidden_size d_model n_embd", "heads": "num_attention_heads n_head n_heads",
    "kv_heads": "num_key_value_heads num_query_groups group_query_attention n_kv_heads",
    "ffn": "intermediate_size ffn_hidden_size d_ff", "vocab": "vocab_size", "mlp": "swiglu hidden_act",
    "seq_len": "max_position_embeddings max_target_length max_seq_len max_seq_length max_length block_size n_positions",
    "norm": "normalization", "positions": "position_embedding_type", "tied": "untie_embeddings_and_output_weights "
    "tie_word_embeddings", "bias": "disable_bias_linear", "experts": "num_experts num_local_experts",
    "experts_per_token": "moe_router_topk num_experts_per_tok", "precision": "bf16 fp16 dtype mixed_precision",
    "zero": "use_distributed_optimizer zero_stage", "adapter": "lora_model_dir", "targets": "target_modules",
    "activations": "recompute recompute_granularity remat_policy gradient_checkpointing remat",
    "reshard_after": "fsdp_reshard_after_forward", "policy": "pipeline_parallel_schedule",
    "virtual_stages": "num_layers_per_virtual_pipeline_stage", "fp32": "float32", "bf16": "bfloat16",
    "adamw": "adamw_torch adamw_torch_fused", "wsd": "warmup_stable_decay", "zero-bubble": "zbh1 zb",
    "interleaved": "interleaved1f1b",
}  # fmt: skip
_ELSEWHERE = {word: name for name, words in _NAMES_ELSEWHERE.items() for word in words.split()}
"""This package's names by those of other systems, including the ones of docs/coming_from.md."""
_NOWHERE = {"cp": "context parallelism", "context_parallel_size": "context parallelism", "fp8": "FP8"}
"""Features of other systems that this package lacks, by their names there."""


def _shown(value: object) -> str:
    try:
        if isinstance(value, list | dict):
            return " ".join(reprlib.repr(value).split())
        return repr(value) if isinstance(value, str) else " ".join(str(value).split())
    except (ValueError, RecursionError):  # integers with thousands of digits, deeply nested tables
        return "(too large to show)"


def _short(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."


def status_of(error: BaseException) -> int:
    """Return the exit status for an exception that ends a command: 2 for bad input, 130 for an interrupt, else 1."""
    return 2 if isinstance(error, UserError) else 130 if isinstance(error, KeyboardInterrupt) else 1


_CREDENTIALS = re.compile(r"//[^/\s@]+@")


def without_credentials(text: str) -> str:
    """Mask the user name and password in addresses such as ``http://me:secret@host``."""
    return _CREDENTIALS.sub("//***@", text)


@contextmanager
def refused(field: str, value: object, accepted: str) -> Iterator[None]:
    """Context that turns a failure to read or write a file into a ``UserError`` with the reason."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(field, str(value), f"{accepted}; {why}") from None


@contextmanager
def as_flags(table: str) -> Iterator[None]:
    """Context in which errors name a field of a table of settings by its command-line flag."""
    try:
        yield
    except UserError as error:
        flag = f"--{error.field.removeprefix(f'{table}.').replace('_', '-')}"
        raise UserError(flag, error.value, error.accepted) from None


def plain(value: Any) -> object:
    """Return array and NumPy scalars, and enumeration members that are texts or numbers, as Python's types."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        with suppress(TypeError):  # a value that jax traces
            value = value.item()
    if isinstance(value, str):
        return str.__str__(value)  # plain str() would return the name of an enumeration's member
    builtin = next((kind for kind in (int, float) if isinstance(value, kind) and not isinstance(value, bool)), None)
    return value if builtin is None else builtin(value)


def integer(field: str, value: Any, least: int, most: int | None = None) -> int:
    """Return a number as a Python integer; raise ``UserError`` for another type, or one out of range."""
    value = plain(value)
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least or (most is not None and number > most):
        accepted = f"an integer of at least {least}" + ("" if most is None else f" and at most {most:,}")
        raise UserError(field, value, accepted)
    return number


_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


def local_path(field: str, text: str) -> str:
    """Expand `~` in a path; raise ``UserError`` for an address of remote storage, such as gs://bucket/run."""
    # Otherwise the address would silently become a local folder `gs:`.
    if _ADDRESS.match(text):
        raise UserError(field, text, "a path of this machine; mount other storage, as with gcsfuse or mountpoint-s3")
    return os.path.expanduser(text)


_NOUNS: Mapping[object, str] = {
    str: "a text", bool: "True or False", NoneType: "None", Path: "the path of a directory", Sequence: "a list",
    Iterable: "a list or an iterator", Mapping: "a mapping", "Grid": "a grid, as ax.init returns one",
}  # fmt: skip
_ENTRIES = ("__iter__", "__getitem__")
_MEMBERS: Mapping[object, Sequence[str]] = {
    Iterable: _ENTRIES, Sequence: _ENTRIES, Mapping: ("keys",), Path: ("__fspath__",)
}  # fmt: skip
"""Members, any of which is enough: arrays are not sequences to Python, nor are other libraries' tables mappings."""
_SCALARS = (bool, int, float, str)
_OPEN = (int, float, Callable, "GradientTransformation")
"""Types, some by name, that functions check themselves: numbers by their range, functions by their arguments."""


def typed_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to check its arguments by their annotations; another type is a ``UserError``.

    Scalars are converted by `plain`. Ranges of numbers, callables and entries of lists are not checked.
    """
    # Type hints are resolved at the first call: at decoration time some names are not defined yet.
    signature, hints = inspect.signature(function), cache(partial(get_type_hints, function))

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # a missing or unknown argument: suggest a similar name, or else let Python raise its error
            near_arguments(function.__qualname__.removesuffix(".__init__"), kwargs, signature.parameters)
            return function(*args, **kwargs)
        for name, value in bound.arguments.items():
            hint, kind = hints().get(name, Any), signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                value = tuple(_typed(name, hint, entry) for entry in value)
            elif kind is inspect.Parameter.VAR_KEYWORD:
                value = {key: _typed(key, hint, entry) for key, entry in value.items()}
            else:
                value = _typed(name, hint, value)
            bound.arguments[name] = value
        return function(*bound.args, **bound.kwargs)

    return checked


def near_arguments(of: str, kwargs: Mapping[str, object], parameters: Iterable[str]) -> None:
    """Raise ``UserError`` for an unknown argument that is similar to one of the parameters of the function `of`."""
    for name in kwargs.keys() - {*parameters}:
        if hint := nearest(name, parameters):
            raise UserError(name, kwargs[name], f"no argument of {of}{hint}")


def _typed(name: str, hint: object, value: object) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if any(kind in _SCALARS or get_origin(kind) is Literal for kind in kinds):
        value = plain(value)
    if not _fits(hint, value):
        short = type(value).__module__ == "builtins" and getattr(hint, "__name__", "") != "Grid"
        raise UserError(name, value if short else type(value).__name__, _accepted(hint, value))
    if Path in kinds and isinstance(value, str | os.PathLike):
        text = local_path(name, os.fsdecode(value))
        return text if isinstance(value, str) else Path(text)
    return value


def _fits(hint: Any, value: object) -> bool:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(option, value) for option in inner)
    if kind is Literal:
        return type(value) is type(inner[0]) and value in inner
    if kind in (Iterable, Sequence) and isinstance(value, Mapping):  # iterating yields its keys, which nobody means
        return False
    if kind in _MEMBERS:
        return any(hasattr(value, member) for member in _MEMBERS[kind])
    try:
        return not {kind, kind.__name__}.isdisjoint(_OPEN) or isinstance(value, kind)
    except TypeError:  # annotations that cannot be checked, such as Any or a protocol
        return True


def _accepted(hint: Any, value: object) -> str:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(_accepted(option, value) for option in inner if option is not str or Path not in inner)
    if kind is Literal:
        return f"one of {', '.join(inner)}{nearest(value, inner) if isinstance(value, str) else ''}"
    home = "models." if ".models." in kind.__module__ else ""
    settings = f"an ax.{home}{kind.__name__}" if hasattr(kind, "table") else f"an instance of {kind.__name__}"
    return _NOUNS.get(kind) or _NOUNS.get(kind.__name__, settings)


def first_of(names: Sequence[object], separator: str = ", ") -> str:
    """Join the first five names, with the number of further ones."""
    return separator.join([*map(str, names[:5]), *([f"and {len(names) - 5} more"] if len(names) > 5 else [])])


def first_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its text, without credentials."""
    return without_credentials(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the candidate that a word most likely means, or an empty text.

    In this order: the name here of another system's setting, a candidate that begins with the word, a similar one. A
    dotted word is compared within its table first. Case does not matter.
    """
    candidates = list(candidates)
    if hint := foreign_name_hint(word, candidates):
        return hint
    names, word = {name.lstrip("-").lower(): name for name in candidates}, word.lstrip("-").lower()
    table = word.removesuffix(last := word.rpartition(".")[2])
    if below := {key.removeprefix(table): name for key, name in names.items() if table and key.startswith(table)}:
        names, word = below, last
    longer = sorted((key for key in names if len(word) > 2 and key.startswith(word)), key=len)
    close = longer[:1] or get_close_matches(word, names, n=1, cutoff=_CLOSE)
    if not close:  # the word may lack its table
        ends = {key.rpartition(".")[2].replace("_", "-"): key for key in names if "." in key}
        close = [ends[end] for end in get_close_matches(word, ends, n=1, cutoff=_CLOSE)]
    return _meant(names[close[0]]) if close else ""


def foreign_name_hint(word: str, candidates: Iterable[str]) -> str:
    """Return the hint of `nearest` for another system's name of a setting, or an empty text."""
    word = word.lstrip("-").lower().rpartition(".")[2].replace("-", "_")
    if absent := _NOWHERE.get(word):
        return f"; {absent} is not here"
    name = _ELSEWHERE.get(word, "")
    end = name.rpartition(".")[2]
    # A name in the list has its table only if several tables have the key; candidates of one table come without it.
    keys = (key for key in candidates if key.lstrip("-") in (name, end) or (name == end and key.endswith(f".{end}")))
    return next(map(_meant, keys), "") if name else ""


def _meant(name: str) -> str:
    return f"; did you mean {name!r}?"


def nearest_or_all(word: str, candidates: Sequence[str]) -> str:
    """Return the hint of `nearest`, or else all candidates: those of the word's table, if it has one."""
    table = word[: word.find(".") + 1] or "none"
    listed = [name for name in candidates if name.startswith(table)] or candidates
    return nearest(word, candidates) or f", which has {', '.join(listed)}"


class _NotGiven:
    def __str__(self) -> str:
        return "(not given)"


UNSET = _NotGiven()
"""Value in the error message for a missing required field."""
