"""Cut of a model into the stages of a pipeline, by its declared costs or as the user says; without jax."""

from collections.abc import Sequence

from axonn_jax.core.errors import UserError
from axonn_jax.core.models.declared.segments import Segment
from axonn_jax.core.settings import PipelineConfig
from axonn_jax.pipe.schedule.partition import SegmentCost, explicit, partition
from axonn_jax.pipe.schedule.policies import policy_of
from axonn_jax.pipe.schedule.tasks import PipelineShape


def check_pipeline(
    pipe: int, microbatches: int, pipeline: PipelineConfig, segments: Sequence[Segment]
) -> tuple[PipelineShape, list[range]]:
    """Return the pipeline's sizes and the segments of every virtual stage.

    Raises:
        UserError: the policy cannot run so, or the model does not split so.
    """
    shape = PipelineShape(pipe, microbatches, pipeline.virtual_stages)
    policy_of(pipeline.policy).check(shape)
    if pipeline.split:
        words = pipeline.split.split(",")
        if not all(word.strip().isdecimal() and len(word) < 10 for word in words):
            raise UserError("pipeline.split", pipeline.split, 'numbers of segments with commas, such as "9,8"')
        return shape, explicit([int(word) for word in words], len(segments), shape.stages)
    costs = [SegmentCost(segment.name, segment.flops, 2 * segment.flops, segment.params) for segment in segments]
    return shape, partition(costs, pipe, pipeline.virtual_stages)
