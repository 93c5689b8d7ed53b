"""Value types of settings, checks of values by type, and documentation texts of settings."""

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from axonn_jax.core.errors import UNSET, UserError, local_path, near_arguments, nearest, plain

T = TypeVar("T")

Optimizer = Literal["adamw", "adam", "sgd", "lion", "adafactor", "muon", "adamw_bf16"]
Schedule = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
"""Schedule of the learning rate after the warm-up."""

Positions = Literal["learned", "rope"]
Norm = Literal["layernorm", "rmsnorm", "rmsnorm_1p"]
Mlp = Literal["gelu", "relu2", "swiglu", "geglu"]
Bias = Literal["all", "qkv", "none"]
RopeScaling = Literal["none", "linear", "llama3", "yarn"]
Router = Literal["softmax", "sigmoid"]
"""Function that turns a router's logits into scores of the experts."""
Dispatch = Literal["gather", "capacity"]
"""Dispatch of tokens to their experts: all of them are gathered, or every expert has a fixed number of slots."""
PruneMethod = Literal["magnitude", "random", "early_bird", "file"]
PruneScope = Literal["layer", "global"]
CachedKeys = Literal["full", "loki"]
"""Cached keys that a generated token attends to."""

InstructionLoss = Literal["response", "all"]
"""Targets of instruction data that count in the loss."""
TooLong = Literal["drop", "cut"]
"""Handling of documents that are longer than a row."""

Rows = Literal["auto", "parts", "whole"]
"""Rows that a user's loss sees at once: a microbatch's rows on one replica, or on all replicas."""
AttentionKernel = Literal["auto", "cudnn", "splash", "blocked", "xla"]

Precision = Literal["fp32", "bf16", "fp16", "auto"]
InferencePrecision = Literal["fp32", "bf16", "auto"]
Accumulate = Literal["fp32", "compute"]
"""Dtype in which gradients add up: float32, or the layers' compute dtype."""
Offload = Literal["none", "optimizer"]
"""State in host memory: none, or the optimizer's state with the float32 weights."""
Zero = Literal[0, 1]
Activations = Literal["none", "full", "dots", "save_collectives", "offload"]
"""Activations that the backward pass recomputes (`offload`: all, with the layers' inputs in host memory)."""
ReshardAfter = Literal["forward", "backward", "step"]
"""When weights gathered over `z` are freed: after a layer's forward, a microbatch's backward, or the step."""

ResidualComm = Literal["all_reduce", "gather", "auto"]
"""Communication of attention and MLP over `x`: all-reduces of wide features, or gathers of the residual stream."""
Order = Literal["auto", "package", "xla"]
"""Order of a step's operations: the package's or XLA's."""
ScanLayers = Literal["auto", "yes", "no"]

PipelinePolicy = Literal["message", "gpipe", "1f1b", "interleaved", "zero-bubble"]
"""Order of a rank's tasks: by arrival of their inputs (`message`), or fixed."""
ChannelName = Literal["auto", "local", "mpi4jax", "mpi4py"]


@dataclass(frozen=True)
class Range:
    """Range of a numeric setting, as metadata of its annotation."""

    accepted: str
    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    zero: bool = False
    """True if zero is accepted, too, whatever `low` is."""

    def check(self, name: str, value: float) -> None:
        """Raise ``UserError`` for a number outside the range."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        if not ((above and below) or (self.zero and value == 0)):  # positive comparisons only, so that NaN fails
            raise UserError(name, value, self.accepted)


_INT32 = 2**31 - 1  # step counters live on the device as int32
_UINT32 = 2**32 - 1  # seeds of PRNG keys, without 64-bit mode
_POSITIVE = Range("a finite number above 0", 0, math.inf, open_low=True, open_high=True)

Count = Annotated[int, Range(f"an integer from 1 to {_INT32}", 1, _INT32)]
CountOrZero = Annotated[int, Range(f"an integer from 0 to {_INT32}", 0, _INT32)]
Seed = Annotated[int, Range(f"an integer from 0 to {_UINT32}", 0, _UINT32)]
Positive = Annotated[float, _POSITIVE]
NotNegative = Annotated[float, Range("a finite number of at least 0", 0, math.inf, open_high=True)]
Density = Annotated[float, Range("a number above 0 and at most 1", 0, 1, open_low=True)]
Share = Annotated[float, Range("a number from 0 to 1", 0, 1)]
Decay = Annotated[float, Range("a number of at least 0 and below 1", 0, 1, open_high=True)]
Probability = Annotated[float, Range("a probability of at least 0 and below 1", 0, 1, open_high=True)]


class LocalPath:
    """Metadata of a text that is a path, in which `~` is expanded (`errors.local_path`)."""


PathText = Annotated[str, LocalPath()]


class DerivedSize(int):
    """A size that is derived from others, again after `dataclasses.replace` has changed those."""


DERIVED = DerivedSize(0)
"""Default of a size that is derived from others."""


class Settings:
    """Base of settings tables: dataclasses that check types and ranges on construction, from TOML or Python.

    Scalars become Python's types (`errors.plain`) and paths texts. Raises ``UserError`` for another type, or a value
    out of range.
    """

    table = ""
    """Name of the table in errors."""

    def __new__(cls, *_: object, **kwargs: object) -> Self:
        """Suggest a similar setting for an unknown one, before Python raises its error."""
        near_arguments(cls.__name__, kwargs, [field.name for field in fields(cast(Any, cls))])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for key, (hint, _) in _fields(kind).items():
            value = getattr(self, key)
            if not isinstance(value, DerivedSize):
                value = str(value) if isinstance(value, Path) else value
                object.__setattr__(self, key, _typed(hint, value, f"{self.table}.{key}", False))


def mlp_inputs(kind: Mlp) -> int:
    """Return the number of input matmuls of a feed-forward layer: two with a gate, otherwise one."""
    return 2 if kind in ("swiglu", "geglu") else 1


_BYTES = {"": 1, "gb": 10**9, "gib": 2**30, "mb": 10**6, "mib": 2**20, "tb": 10**12}


def amount(name: str, text: str, units: Mapping[str, int], accepted: str) -> tuple[Fraction, Fraction]:
    """Parse an amount with an optional unit; raise ``UserError`` for other texts.

    Args:
        name: Name of the value in errors.
        text: The text, such as 1.5GB.
        units: Factors of the units, in lower case.
        accepted: Description of accepted texts for errors.

    Returns:
        The amount, and its uncertainty from rounding: half of the last digit if there is a unit, otherwise 0.
    """
    match = re.fullmatch(r"(\d+(?:\.(\d+))?)\s*([a-z]*)", text.strip().replace("_", "").replace(",", "").lower())
    if match is None or match[3] not in units:
        raise UserError(name, text, accepted)
    unit = units[match[3]]
    return Fraction(match[1]) * unit, Fraction(unit, 2 * 10 ** len(match[2] or "")) if match[3] else Fraction(0)


def amount_of_bytes(name: str, text: str, accepted: str) -> int:
    """Parse an amount of memory such as 36GB or 32GiB, or 0, into bytes; raise ``UserError`` for other texts."""
    # A bare number is refused: some people would mean bytes, and some GB.
    count, rounded = amount(name, text, _BYTES, accepted)
    if count and not rounded:
        raise UserError(name, text, f"{accepted}; a number needs its unit")
    return int(count)


_NOUNS: Mapping[object, str] = {
    int: "an integer", float: "a number", str: "a text", bool: "true or false", NoneType: "null"
}  # fmt: skip
_LARGEST = 2**63 - 1
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")


def typed(kind: type[T], value: object, name: str = "", *, closed: bool = False) -> T:
    """Check a value of TOML or JSON, and convert it to a type; the only scalars converted are integers to floats.

    Args:
        kind: Dataclass (from a table), tuple, mapping of texts, choice (`Literal`) or plain type, which may be
            annotated with a `Range`.
        value: The value; `name` is its name in errors.
        closed: True to refuse unknown keys of dataclasses, which later versions may write.

    Raises:
        UserError: A field is missing, unknown, out of range or not of its type.
    """
    result: T = _typed(kind, value, name, closed)
    return result


def _typed(kind: object, value: Any, name: str, closed: bool) -> Any:
    if get_origin(kind) in (Union, UnionType):
        if value is None and NoneType in get_args(kind):
            return None
        kind = not_none(kind)
    note, value = None, plain(value)
    if get_origin(kind) is Annotated:
        kind, note = get_args(kind)
    origin = get_origin(kind)
    if is_dataclass(kind):
        return _built(kind, value, name, closed)
    inner = get_args(kind)
    if origin is Literal:
        if type(value) is not type(inner[0]) or value not in inner:
            hint = nearest(value, map(str, inner)) if isinstance(value, str) else ""
            raise UserError(name, value, f"one of {', '.join(str(choice) for choice in inner if choice != '')}{hint}")
        return value
    if origin is tuple:
        if type(value) not in (list, tuple):
            raise UserError(name, value, "a list")
        return tuple(_typed(inner[0], entry, f"{name}[{at}]", closed) for at, entry in enumerate(value))
    if origin is not None:  # Mapping
        if type(value) is not dict:
            raise UserError(name, value, "a table")
        keys = {key: _typed(inner[0], key, name, closed) for key in value}
        return {keys[key]: _typed(inner[1], entry, f"{name}[{key!r}]", closed) for key, entry in value.items()}
    int_for_float = kind is float and type(value) is int
    if kind in (Any, object) or ((type(value) is kind or int_for_float) and not _strange(value)):
        if isinstance(note, LocalPath):
            return local_path(name, value)
        if note is not None:
            note.check(name, value)
        return float(value) if int_for_float else value
    strange = {str: " without NUL", int: " of at most 64 bits"}[kind] if type(value) is kind else ""
    raise UserError(name, value, note.accepted if isinstance(note, Range) else _NOUNS[kind] + strange)


def _strange(value: object) -> bool:
    # Such integers exceed 64 bits; such texts cannot be paths, or be written as UTF-8.
    if type(value) is str:
        return _UNWRITABLE.search(value) is not None
    return type(value) is int and not -_LARGEST - 1 <= value <= _LARGEST


def not_none(kind: object) -> object:
    """Return the type of an optional value; any other type unchanged."""
    if get_origin(kind) in (Union, UnionType):
        return next(option for option in get_args(kind) if option is not NoneType)
    return kind


def _built(kind: Any, value: object, name: str, closed: bool) -> object:
    hints = _fields(kind)
    if type(value) is not dict:
        raise UserError(name or "content", value, f"a table with the keys {', '.join(hints)}")
    prefix = f"{name}." if name else ""
    for key in value if closed else ():
        if key not in hints:
            accepted = f"not a known key{nearest(key, hints)}; those are {', '.join(hints)}"
            raise UserError(prefix + key, value[key], accepted)
    kwargs = {}
    for key, (hint, required) in hints.items():
        if key in value:
            kwargs[key] = _typed(hint, value[key], prefix + key, closed)
        elif required:
            raise UserError(prefix + key, UNSET, "required")
    return kind(**kwargs)


@cache
def _fields(kind: Any) -> Mapping[str, tuple[object, bool]]:
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: (hints[f.name], f.default is MISSING and f.default_factory is MISSING) for f in fields(kind)}


def is_muons(name: str, rank: int) -> bool:
    """Return True if Muon updates a parameter: a matrix of a hidden layer. AdamW updates all others."""
    return rank == 2 and name.endswith(".kernel") and name != "head.kernel"


def field_docs(cls: Any) -> dict[str, str]:
    """Return the documentation text of each field of a dataclass; a field with metadata `of` has that class's text."""
    # Python drops the strings under fields, so they are read from the source; bases first, as in `fields`.
    docs: dict[str, str] = {}
    for owner in filter(is_dataclass, reversed(cls.__mro__)):
        source = inspect.getsource(owner)  # type: ignore[arg-type]
        (tree,) = ast.parse(textwrap.dedent(source)).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                docs[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    for entry in fields(cls):
        if of := entry.metadata.get("of"):
            default = next(f.default for f in fields(of) if f.name == entry.name)
            plain = default is not MISSING and not isinstance(default, DerivedSize)
            shown = str(default).lower() if isinstance(default, bool) else default
            docs[entry.name] = field_docs(of)[entry.name] + (f" Default: {shown}, or the preset's." if plain else "")
    return docs
