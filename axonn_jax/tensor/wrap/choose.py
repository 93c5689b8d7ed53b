"""Chooses a layer's plan: which axis splits what, given how its input arrives."""

from dataclasses import replace
from typing import Any

from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from axonn_jax.tensor.linear import TensorAxis, other
from axonn_jax.tensor.wrap.kinds import Kernel, Norm, Side, describe
from axonn_jax.tensor.wrap.plan import LayerPlan, Stream, place


class Chooser:
    """Makes plans on one mesh; knows nothing of the order of layers."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh

    def plan(self, layer: Any, arrives: Stream | None, override: str | None) -> LayerPlan:
        """The plan of a layer whose input arrives as said (None: not split over `x` or `y`).

        `override` is "replicated", or the axis to contract over ("x", "y": for an embedding or a norm the one that
        splits its features).
        """
        described = describe(layer)
        kind = type(layer).__name__
        if isinstance(described, str):
            return LayerPlan(kind, self.mesh, False, note=described)
        if override == "replicated":
            return self._by_rows(kind, described, "by an override")
        # Ids are not split over x or y: an embedding starts a residual stream, over x, wherever it stands.
        axis: TensorAxis = "x" if arrives is None or isinstance(layer, nnx.Embed) else arrives.axis
        if override is not None:
            axis = "y" if override == "y" else "x"
        if isinstance(described, Norm):
            return self._norm(kind, described, arrives, axis, forced=override is not None)
        if described.groups > 1:
            return self._grouped(kind, described, arrives, axis, forced=override is not None)
        if isinstance(layer, nnx.Embed):
            return self._kernel(kind, described, other(axis), axis)
        plan = self._kernel(kind, described, axis, other(axis))
        if plan.sharded and arrives is not None and axis != arrives.axis:
            return replace(plan, note="; ".join(filter(None, (plan.note, f"its input arrives over {arrives.axis}"))))
        return plan

    def leaves(self, layer: Any, plan: LayerPlan, arrives: Stream | None, method: str = "__call__") -> Stream | None:
        """How the output of a layer lies that has this plan."""
        described = describe(layer)
        if not plan.sharded or not isinstance(described, Kernel):
            return arrives
        if method == "attend":
            return None if plan.in_axis is None else Stream(plan.in_axis, described.shape[0], True)
        if plan.out_axis is None:
            return None
        side = next(s for s in described.outs if s.activation == plan.dims.y)
        return Stream(plan.out_axis, side.size, side.activation == -1)

    def _norm(self, kind: str, norm: Norm, arrives: Stream | None, axis: TensorAxis, *, forced: bool) -> LayerPlan:
        if not forced and (arrives is None or not arrives.last or arrives.size != norm.features):
            return LayerPlan(kind, self.mesh, False, note="the features it normalises are not split where it stands")
        if norm.features % self.mesh.shape[axis]:
            note = _uneven("features", norm.features, axis, self.mesh.shape[axis])
            return LayerPlan(kind, self.mesh, False, note=note)
        specs = tuple((name, P(axis)) for name in norm.names)
        return LayerPlan(kind, self.mesh, True, axis, axis, specs, sizes=(norm.features, norm.features))

    def _grouped(
        self, kind: str, kernel: Kernel, arrives: Stream | None, axis: TensorAxis, *, forced: bool
    ) -> LayerPlan:
        """Groups of features stay where they arrive: each device has the kernels of its own."""
        (side_in,), (side_out,) = kernel.ins, kernel.outs
        if not forced and (arrives is None or not arrives.last or arrives.size != side_in.size):
            return self._by_rows(kind, kernel, "the features of its groups are not split where it stands")
        if kernel.groups % self.mesh.shape[axis]:
            return self._by_rows(kind, kernel, _uneven("groups", kernel.groups, axis, self.mesh.shape[axis]))
        specs = ((kernel.name, place(len(kernel.shape), (side_out.kernel, axis))), ("bias", P(axis)))
        dims = kernel.dims(side_in, side_out)
        return LayerPlan(kind, self.mesh, True, axis, axis, specs, dims, sizes=kernel.features)

    def _by_rows(self, kind: str, layer: Kernel | Norm, note: str) -> LayerPlan:
        """Whole parameters on every device; a kernel's layer has its rows split by hand all the same.

        XLA's partitioner gets the kernel gradient of a grouped convolution wrong (jaxlib 0.10.2: rows split over some
        devices, and the same on others).
        """
        if isinstance(layer, Norm):
            return LayerPlan(kind, self.mesh, False, note=note)
        return LayerPlan(kind, self.mesh, True, dims=layer.dims(None, None), note=note, sizes=layer.features)

    def _kernel(self, kind: str, kernel: Kernel, in_axis: TensorAxis, out_axis: TensorAxis) -> LayerPlan:
        ends = ("vocabulary", "features") if kernel.name == "embedding" else ("input", "output")
        side_in, note_in = self._side(kernel.ins, in_axis, ends[0])
        side_out, note_out = self._side(kernel.outs, out_axis, ends[1])
        split: dict[int, tuple[str, ...]] = {}
        if side_in is not None:
            split[side_in.kernel] = (in_axis,)
        if side_out is not None:
            split[side_out.kernel] = (out_axis,)
        # z preferably where the algorithm has it, on the contracted dim.
        order = [*split, *(side.kernel for side in (*kernel.ins, *kernel.outs)), *range(len(kernel.shape))]
        z_dim, z = None, self.mesh.shape["z"]
        for dim in order:
            parts = z
            for axis in split.get(dim, ()):
                parts *= self.mesh.shape[axis]
            if kernel.shape[dim] % parts == 0:
                z_dim, split[dim] = dim, (*split.get(dim, ()), "z")
                break
        note_z = "" if z_dim is not None else f"no dim of its weight {kernel.shape} divides by z = {z}"
        notes = "; ".join(filter(None, (note_in, note_out, note_z)))
        if side_in is None and side_out is None:
            return self._by_rows(kind, kernel, notes)
        spec = P(*(split.get(dim) for dim in range(len(kernel.shape))))
        specs: tuple[tuple[str, P], ...] = ((kernel.name, spec),)
        if kernel.bias is not None:
            y = None if side_out is None else side_out.activation
            specs += (("bias", P(*(out_axis if dim == y else None for dim in kernel.bias))),)
        return LayerPlan(
            kind,
            self.mesh,
            True,
            in_axis if side_in is not None else None,
            out_axis if side_out is not None else None,
            specs,
            kernel.dims(side_in, side_out),
            z_dim,
            notes,
            kernel.features,
        )

    def _side(self, sides: tuple[Side, ...], axis: TensorAxis, end: str) -> tuple[Side | None, str]:
        """The first candidate that divides over the axis, or why there is none."""
        parts = self.mesh.shape[axis]
        for side in sides:
            if side.size % parts == 0:
                return side, ""
        return None, _uneven(end, sides[0].size, axis, parts)


def _uneven(what: str, size: int, axis: str, parts: int) -> str:
    return f"{what} {size} does not divide by {axis} = {parts}"
