"""Flags of `plan` and `simulate`, and the planner question they describe."""

from dataclasses import dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

from axonn_jax.cli.arguments import Arg
from axonn_jax.cli.plan.model import NamedModel, resolve_model, sequences
from axonn_jax.cli.plan.refusals import VIRTUAL, check_legal
from axonn_jax.core.errors import UserError, nearest
from axonn_jax.core.grid import GRID_AXES, MOST_DEVICES
from axonn_jax.core.ops.language import FLOAT32
from axonn_jax.core.options import (
    Activations,
    Offload,
    PipelinePolicy,
    Precision,
    ReshardAfter,
    ResidualComm,
    amount_of_bytes,
)
from axonn_jax.pipe.schedule.policies import ByArrival, policy_of
from axonn_jax.planning.machines.machine_file import load_machine
from axonn_jax.planning.memory import itemsize
from axonn_jax.planning.request import Candidate, OverlapFlags, PlanRequest
from axonn_jax.planning.search import SearchResult, search
from axonn_jax.planning.space import SEARCHED, SearchSpace

SEQUENCES = 8
"""Default sequences per device of a step."""
_OVERLAPS = tuple(f.name for f in fields(OverlapFlags))

Count = Annotated[int, Arg(least=1, most=MOST_DEVICES)]
Searched = Annotated[int | None, Arg(default="searched", least=1, most=MOST_DEVICES)]


@dataclass(frozen=True)
class Axes:
    """Fixed sizes of the grid's axes."""

    pipe: Searched = None
    """Pipeline stages."""
    data: Searched = None
    """Replicas."""
    expert: Searched = None
    """Shards of experts."""
    z: Searched = None
    """Shards of batch and weights."""
    y: Searched = None
    """Shards of output features, heads, vocabulary."""
    x: Searched = None
    """Shards of input features."""

    def fixed(self) -> dict[str, int]:
        """Return the sizes of the axes that flags fix."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """Model, machine, and the fixed values of the candidates on it."""

    model: str
    """Name of a published model (docs/train.md lists them), a configuration (.toml), or the directory of a run or of a
    Hugging Face model."""
    machine: str
    """Name of a machine, or the path of a machine file (docs/plan.md)."""
    devices: Count
    """Number of devices: GPUs, or GCDs."""
    batch_tokens: Annotated[str | None, Arg(default=f"{SEQUENCES} sequences a device, or a configuration's")] = None
    """Tokens a step over all devices: 16777216, or rounded, such as 16.8M."""
    grid: Axes = field(default_factory=Axes)
    """Fixed axes."""
    microbatch: Searched = None
    """Sequences of a microbatch on a device."""
    activations: Annotated[Literal["auto"] | Activations, Arg(short="--memory.activations")] = "auto"
    """Activation policy; auto: searched."""
    reshard_after: Annotated[Literal["auto"] | ReshardAfter, Arg(short="--memory.reshard_after")] = "auto"
    """Lifetime of weights gathered over z; auto: searched."""
    offload: Annotated[Literal["auto"] | Offload, Arg(short="--memory.offload")] = "auto"
    """State in host memory: none, or optimizer; auto: searched."""
    zero: Annotated[Literal["auto", "0", "1"], Arg(short="--memory.zero")] = "auto"
    """1: replicas share optimizer state (ZeRO-1); 0: each replica has all; auto: searched."""
    sequence_parallel: Annotated[bool, Arg(short="--memory.sequence_parallel")] = False
    """Split the sequence of the residual stream over grid.y."""
    residual_comm: Annotated[ResidualComm, Arg(short="--tensor.residual_comm")] = "all_reduce"
    """Communication of blocks: all_reduce, gather or auto."""
    virtual_stages: Annotated[int | None, Arg("searched", short=VIRTUAL, least=1, most=MOST_DEVICES)] = None
    """Virtual stages of each pipeline rank; more than one: only pipelines are searched."""
    policy: Annotated[PipelinePolicy, Arg(short="--pipeline.policy")] = "message"
    """Order of a stage's tasks."""
    precision: Annotated[Precision, Arg(short="--memory.precision")] = "auto"
    """Precision of computation; auto: the machine's half precision."""
    overlap: str = "all"
    """Collectives that run beside matmuls: all, none, or some of gathers,scatters,gradients,forward."""
    memory_limit: Annotated[str | None, Arg(default="what surely fits")] = None
    """Usable memory of a device, such as 36GB."""
    png: Annotated[Path | None, Arg(default="none")] = None
    """Draw a picture of the answer into this file."""
    json: bool = False
    """Print one JSON object instead of the text."""
    settings: Annotated[tuple[str, ...], Arg(settings=True)] = ()
    """Any other setting of `train`, such as --model.hidden 4096, --lora.rank 16 or --train.optimizer lion."""


class Question(NamedTuple):
    """Planner question: a request, its devices, and the space to search."""

    request: PlanRequest
    devices: int
    space: SearchSpace
    limit: float
    """Usable bytes of a device's memory."""
    model: NamedModel

    def answer(self, limited: bool = True) -> SearchResult:
        """Return the result of the search; with `limited=False` regardless of the devices' memory.

        Raises:
            UserError: No grid is legal, or none fits.
        """
        try:
            return search(self.request, self.devices, self.space, self.limit if limited else float("inf"))
        except UserError as error:
            # The search only says that nothing is left: name the flag at fault where no grid is legal at all.
            check_legal(self.request, self.devices, self.space)
            if not limited or self.limit >= self.request.memory_limit():
                raise
            closest = str(error).partition("; ")[2]
            raise UserError("--memory-limit", f"{self.limit / 1e9:g}GB", f"an amount that fits; {closest}") from None


def ask(args: PlanFlags) -> Question:
    """Return the planner question that the flags describe.

    Raises:
        UserError: A flag is wrong, or flags exclude each other.
    """
    machine = load_machine(args.machine, "--machine").shared(args.devices)
    model = resolve_model(args.model, args.settings)
    shape, config = model.shape, model.config
    batch = model.batch or SEQUENCES * args.devices
    if args.batch_tokens is not None:
        if model.batched:
            raise UserError("--batch-tokens", args.batch_tokens, "left out beside --train.global_batch")
        batch = sequences(args.batch_tokens, shape.seq_len)
    if args.sequence_parallel and args.residual_comm == "gather":
        accepted = "all_reduce or auto with --memory.sequence_parallel"
        raise UserError("--tensor.residual_comm", args.residual_comm, accepted)
    precision = machine.half if args.precision == "auto" else args.precision
    machine.peak(precision)  # raises if the device does not support it
    # Adapters are trained in float32 whatever the precision of computation.
    compute = config.memory.accumulate == "compute" and not config.lora.adapts
    request = PlanRequest(
        shape, machine, batch, precision, density=config.prune.density, moe=config.moe, lora=config.lora,
        switches=_switches(args.overlap), policy=args.policy, split=config.pipeline.split_backward,
        sequence_split=args.sequence_parallel, residual_comm=args.residual_comm,
        gradient_item=itemsize(precision) if compute else FLOAT32, bucket=config.memory.bucket,
        optimizer=config.train.stateful, average=config.train.ema > 0.0, packed=model.packed,
        sub_batches=config.tensor.sub_batches,
    )  # fmt: skip
    limit = _limit(args.memory_limit, request)
    return Question(request, args.devices, model.within(_space(args)), limit, model)


def _space(args: PlanFlags) -> SearchSpace:
    axes, stages = args.grid.fixed(), args.virtual_stages
    if args.reshard_after in ("backward", "step") and max(axes.get("pipe", 1), stages or 1) > 1:
        accepted = "auto or forward where --grid.pipe or --pipeline.virtual_stages is above 1"
        raise UserError("--memory.reshard_after", args.reshard_after, accepted)
    if stages is not None and stages > 1:
        other_shards = prod(size for axis, size in axes.items() if axis != "pipe")
        if axes.get("pipe") == 1 or ("pipe" not in axes and other_shards == args.devices):
            raise UserError(VIRTUAL, stages, "1 without a pipeline, which --grid.pipe above 1 makes")
        if refusal := policy_of(args.policy).one_stage:
            raise UserError(VIRTUAL, stages, f"1 with --pipeline.policy {args.policy} ({refusal})")
    return SearchSpace(
        axes=axes,
        sequences=args.microbatch,
        activations=SEARCHED if args.activations == "auto" else (args.activations,),
        offload=(False, True) if args.offload == "auto" else (args.offload == "optimizer",),
        zero=(0, 1) if args.zero == "auto" else (int(args.zero),),
        virtual_stages=(1, 2, 4) if stages is None else (stages,),
        reshard_after=get_args(ReshardAfter) if args.reshard_after == "auto" else (args.reshard_after,),
    )


def _limit(text: str | None, request: PlanRequest) -> float:
    if text is None:
        return request.memory_limit()
    limit = amount_of_bytes("--memory-limit", text, "an amount such as 36GB or 32GiB")
    if limit <= 0:
        raise UserError("--memory-limit", text, "an amount above 0, such as 36GB")
    device = request.machine.device
    if limit > device.memory_bytes:
        accepted = f"at most {device.memory_bytes / 1e9:.5g}GB, the memory of {device.kind}"
        raise UserError("--memory-limit", text, accepted)
    return float(limit)


def _switches(text: str) -> OverlapFlags:
    if text in ("all", "none"):
        return OverlapFlags(**dict.fromkeys(_OVERLAPS, text == "all"))
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in _OVERLAPS:
            raise UserError("--overlap", text, f"all, none, or some of {','.join(_OVERLAPS)}{nearest(name, _OVERLAPS)}")
    return OverlapFlags(**{name: name in names for name in _OVERLAPS})


def command(model: NamedModel, request: PlanRequest, candidate: Candidate) -> str:
    """Return the command that trains this candidate, except for the data in CONFIG.toml."""
    grid = candidate.grid
    # By default mpirun binds each process to one core if there are two of them, and to a package otherwise.
    unbound = "--bind-to none " if grid.devices == 2 else ""
    words = [f"mpirun {unbound}-n {grid.devices}" if grid.devices > 1 else "", f"axonn-jax train {model.words}"]
    base = model.config
    # Say only what differs from the user's configuration, so that the command stays short.
    words += [f"--grid.{a} {getattr(grid, a)}" for a in GRID_AXES if getattr(grid, a) != getattr(base.grid, a)]
    words += [] if model.batched else [f"--train.global_batch {request.batch}"]
    words.append(f"--train.microbatches {candidate.microbatches}")
    words.append(f"--memory.precision {request.precision} --memory.activations {candidate.activations}")
    offload = "optimizer" if candidate.offload else "none"
    memory = {"reshard_after": candidate.reshard_after, "offload": offload, "zero": candidate.zero}
    memory |= {"sequence_parallel": str(request.sequence_split).lower()}
    words += [
        f"--memory.{key} {new}" for key, new in memory.items() if str(getattr(base.memory, key)).lower() != str(new)
    ]
    comm = request.residual_comm
    words += [f"--tensor.residual_comm {comm}"] if comm != base.tensor.residual_comm else []
    if grid.pipe > 1:
        words.append(f"--pipeline.policy {request.policy}")
        arrival = isinstance(request.schedule(candidate), ByArrival)
        unsplit = arrival and not request.split and base.pipeline.split_backward
        words += ["--pipeline.split_backward false"] if unsplit else []
        words += ["--pipeline.split="] if base.pipeline.split else []
        planned = {"virtual_stages": candidate.virtual_stages, "in_flight": candidate.in_flight}
        words += [f"--pipeline.{key} {new}" for key, new in planned.items() if getattr(base.pipeline, key) != new]
    return " ".join(word for word in words if word)


def question_fields(args: PlanFlags, request: PlanRequest) -> dict[str, object]:
    """Return the JSON fields of the question itself."""
    return {
        "model": args.model,
        "machine": args.machine,
        "devices": args.devices,
        "batch_sequences": request.batch,
        "seq_len": request.shape.seq_len,
        "precision": request.precision,
        "sequence_parallel": request.sequence_split,
        "density": request.density,
        "lora_rank": request.lora.rank,
        "residual_comm": request.residual_comm,
    }


def candidate_fields(request: PlanRequest, candidate: Candidate) -> dict[str, object]:
    """Return the JSON fields of a candidate, except for its grid."""
    return {
        "microbatch": candidate.sequences(request.batch),
        "microbatches": candidate.microbatches,
        "virtual_stages": candidate.virtual_stages,
        "in_flight": in_flight(request, candidate),
        "activations": candidate.activations,
        "reshard_after": candidate.reshard_after,
        "offload": "optimizer" if candidate.offload else "none",
        "zero": candidate.zero,
    }


def in_flight(request: PlanRequest, candidate: Candidate) -> int:
    """Return the microbatches in flight under the message-driven policy; 0 under other policies."""
    policy = request.schedule(candidate)
    return policy.depth(candidate.pipeline) if isinstance(policy, ByArrival) and candidate.grid.pipe > 1 else 0
