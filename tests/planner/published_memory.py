"""Published totals of model state: AxoNN (IPDPS 22), SAMO (pruned, IPDPS 23), TED's bound for experts (ICS 23)."""

from dataclasses import dataclass

from axonn_jax.planner.memory import device_state

_HALF, _FP32, _INT32 = 2, 4, 4
_OFFLOAD_BUFFERS = 4  # weight, gradient and both moments of one bucket, float32


def offload_buffers(bucket: float) -> float:
    """AxoNN's device buffers for an offloaded update of `bucket` elements: 16 bytes an element (IPDPS 22)."""
    return _OFFLOAD_BUFFERS * _FP32 * bucket


def axonn_state(params: float, *, offload: bool = False, bucket: float = 16_000_000) -> float:
    """AxoNN's model state on the device: 20 bytes a parameter, or 4 and the buffers of a bucket (IPDPS 22)."""
    if offload:
        return device_state(params, "fp16", gradient_item=_HALF, offload=True).total + offload_buffers(bucket)
    upcast = params * _FP32  # all gradients once more in float32
    return device_state(params, "fp16", gradient_item=_HALF, apart=True).total + upcast


@dataclass(frozen=True)
class SamoState:
    """SAMO's state of a pruned network in bytes: dense half weights, all else for the kept entries only."""

    weights: float
    gradients: float
    master: float
    master_gradients: float
    moments: float
    index: float
    downcast: float

    @property
    def total(self) -> float:
        """(2 + 24 f) bytes a parameter."""
        kept = self.gradients + self.master + self.master_gradients + self.moments + self.index + self.downcast
        return self.weights + kept


def samo_state(params: float, kept: float) -> SamoState:
    """State of `params` parameters of which the fraction `kept` is not pruned (IPDPS 23, section on memory)."""
    alive = params * kept
    return SamoState(
        weights=_HALF * params,
        gradients=_HALF * alive,
        master=_FP32 * alive,
        master_gradients=_FP32 * alive,
        moments=2 * _FP32 * alive,
        index=_INT32 * alive,
        downcast=_HALF * alive,
    )


def ted_state(base_params: float, experts: int, tensor: int, expert: int, devices: int) -> float:
    """TED's lower bound of state a device: experts in every second layer, ZeRO-1 in both data groups (ICS 23).

    `tensor` and `expert` are the sizes of their groups. With as many expert groups as experts this is
    `4 P (1/tensor + (experts + 2)/devices)`.
    """
    dense_replicas = devices / tensor
    expert_replicas = dense_replicas / expert
    dense = base_params * 2 / 3 / tensor
    sparse = experts * base_params / 3 / (tensor * expert)
    # Half weights and gradients, then float32 weights and moments.
    return (4 + 12 / dense_replicas) * dense + (4 + 12 / expert_replicas) * sparse
