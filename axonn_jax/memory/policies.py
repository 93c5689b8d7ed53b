"""Activation policies as settings say them: one for all layers, or one for each range of layers; no jax."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from axonn_jax.errors import UserError, nearest

Policy = Literal["none", "full", "dots", "save_collectives", "offload"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
FIELD = "memory.activations"
_ACCEPTED = f'one of {", ".join(POLICIES)}, or policies with layers such as "full:0-11,dots:12-17,none"'


@dataclass(frozen=True)
class Policies:
    """The policy of every layer, first layer 0."""

    text: str
    rest: Policy
    """Of layers in none of the ranges."""
    ranges: tuple[tuple[Policy, range], ...] = ()

    @property
    def uniform(self) -> Policy | None:
        """The policy of all layers, None where ranges have their own."""
        return None if self.ranges else self.rest

    def of(self, layer: int) -> Policy:
        """A layer's."""
        return next((policy for policy, layers in self.ranges if layer in layers), self.rest)

    def check(self, layers: int) -> None:
        """Raises ``UserError`` where a range names a layer that a model of so many has not."""
        for _, some in self.ranges:
            if some[-1] >= layers:
                raise UserError(FIELD, self.text, f"layers from 0 to {layers - 1}, which the model has")

    def check_pipelined(self) -> None:
        """Raises ``UserError`` for what a pipeline does not do: it offloads the inputs of stages, not of layers."""
        if any(policy == "offload" for policy, _ in self.ranges) or (self.ranges and self.rest == "offload"):
            raise UserError(FIELD, self.text, "offload for all layers or for none where grid.pipe is above 1")


def read_policies(text: str) -> Policies:
    """Reads `POLICY`, or `POLICY:FIRST-LAST` and `POLICY:LAYER` with commas, of which one may have no layers: the rest.

    Without that one, the rest is `none`. Raises ``UserError`` for anything else.
    """
    rest: list[Policy] = []
    ranges: list[tuple[Policy, range]] = []
    for item in text.split(","):
        word, colon, layers = (part.strip() for part in item.partition(":"))
        policy = next((known for known in POLICIES if known == word), None)
        if policy is None:
            raise UserError(FIELD, text, _ACCEPTED + (nearest(word, POLICIES) if word else ""))
        if not colon:
            rest.append(policy)
            continue
        found = re.fullmatch(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?", layers)
        some = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
        if not some:
            raise UserError(FIELD, text, _ACCEPTED)
        for _, other in ranges:
            twice = range(max(some.start, other.start), min(some.stop, other.stop))
            if twice:
                raise UserError(FIELD, text, f"one policy a layer; layer {twice[0]} has two")
        ranges.append((policy, some))
    if len(rest) > 1:
        raise UserError(FIELD, text, f"one policy without layers; {' and '.join(rest)} have none")
    return Policies(text, rest[0] if rest else "none", tuple(ranges))
