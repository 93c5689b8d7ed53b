"""Sizes of a mixture of experts, and how tokens choose; no jax."""

from dataclasses import dataclass

from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GridShape, divides, divisors
from axonn_jax.core.options import Dispatch, NotNegative, Positive, Router, Settings


@dataclass(frozen=True)
class MoeConfig(Settings):
    """Training of experts; used where model.experts is set."""

    table = "moe"

    balance_weight: NotNegative = 0.001
    """Weight of the balance loss, per sequence and layer: in the gradients, not in the reported loss. transformers'
    router_aux_loss_coef times experts_per_token over the layers with experts. 0: none."""
    balance_rate: NotNegative = 0.0
    """Step of the router's biases after each update, towards experts with fewer tokens than the mean: balance without a
    loss (DeepSeek-V3 used 0.001). 0: fixed biases."""
    dispatch: Dispatch = "gather"
    """Way of tokens to their experts. gather: all tokens of grid.expert are gathered, none is dropped, and the loss is
    the same on every grid; capacity: each expert has a fixed number of slots for a device's tokens, exchanged by
    all-to-all, and drops the rest (TED)."""
    capacity: Positive = 1.25
    """Slots of an expert over the mean number of tokens that choose it (capacity)."""

    @property
    def drops(self) -> bool:
        """True if tokens without a slot are dropped."""
        return self.dispatch == "capacity"

    @property
    def slack(self) -> float:
        """Slots of an expert over the mean number of tokens that choose it; 1 where there are no slots."""
        return self.capacity if self.drops else 1.0


@dataclass(frozen=True)
class ExpertShape:
    """Experts of a layer: the expert fields of `models.ModelShape`, without their prefixes."""

    experts: int
    per_token: int
    ffn: int
    every: int = 1
    first: int = 0
    shared: int = 0
    router: Router = "softmax"
    norm: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1

    def is_routed(self, layer: int) -> bool:
        """Return True if the layer has experts instead of a dense feed-forward layer."""
        return layer >= self.first and (layer - self.first) % self.every == 0

    def check(self) -> None:
        """Raise ``UserError`` if the numbers contradict each other."""
        if not 1 <= self.per_token <= self.experts:
            accepted = f"an integer from 1 to model.experts = {self.experts}"
            raise UserError("model.experts_per_token", self.per_token, accepted)
        if self.experts % self.groups:
            legal = ", ".join(map(str, divisors(self.experts)))
            raise UserError("model.router_groups", self.groups, f"a divisor of model.experts: {legal}")
        if not 1 <= self.groups_kept <= self.groups:
            accepted = f"an integer from 1 to model.router_groups = {self.groups}"
            raise UserError("model.router_groups_kept", self.groups_kept, accepted)
        if self.groups > 1 and self.router == "softmax":
            raise UserError("model.router_groups", self.groups, "1 where model.router is softmax")
        in_groups = self.groups_kept * (self.experts // self.groups)
        if in_groups < self.per_token:
            accepted = f"at most {in_groups}, the experts in model.router_groups_kept = {self.groups_kept} groups"
            raise UserError("model.experts_per_token", self.per_token, accepted)
        if self.groups > 1 and self.experts // self.groups < 2:
            raise UserError("model.router_groups", self.groups, f"at most {self.experts // 2}: a group has two or more")

    def check_grid(self, grid: GridShape, seq_len: int) -> None:
        """Raise ``UserError`` unless experts, their features and the tokens of a sequence divide over the grid."""
        divides("model.experts", self.experts, grid.expert, "grid.expert", axis="grid.expert")
        divides("model.expert_ffn", self.ffn, grid.y * grid.x * grid.z, "y*x*z")
        # Duplicate token dropping: each device along `y` sends an equal slice of the tokens.
        if grid.expert > 1 and grid.y > 1:
            divides("model.seq_len", seq_len, grid.y, "y (with grid.expert)", axis="grid.y")
        if self.shared:
            divides("model.expert_ffn * model.shared_experts", self.ffn * self.shared, grid.y * grid.z, "y*z")


def slots_of(tokens: int, per_token: int, experts: int, capacity: float) -> int:
    """Return an expert's slots for the tokens of one device: `capacity` times its mean load, rounded up."""
    # One slot per token suffices: a token never chooses the same expert twice.
    return min(tokens, max(1, -int(-(tokens * per_token * capacity) // experts)))
