"""The planner on models with experts: memory beside compiled steps, grids, and DeepSpeed-TED's published facts."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
import ted
from hlo.steps import compile_abstract, keep_recomputation
from jax.sharding import NamedSharding

from axonn_jax.core.engines.step import abstract, build_step
from axonn_jax.core.experts.shape import MoeConfig
from axonn_jax.core.grid import GridShape, build_grid
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.models.presets import preset
from axonn_jax.core.settings import MemoryConfig, TensorConfig
from axonn_jax.core.tensor.params import split_module
from axonn_jax.planning.cost_model.model import CostModel
from axonn_jax.planning.machines.machine_file import load_machine
from axonn_jax.planning.memory_model import MemoryModel
from axonn_jax.planning.request import Candidate, PlanRequest
from axonn_jax.planning.search import search
from axonn_jax.planning.simulate.candidate import Prices
from axonn_jax.planning.space import SearchSpace, legal_grids

SHAPE = replace(preset("gpt-1.3b", layers=2, seq_len=512), experts=8, experts_per_token=2, expert_ffn=2048)
CAPACITY = MoeConfig(dispatch="capacity")
MIXTRAL = PlanRequest(preset("mixtral-8x7b"), load_machine("alps"), 1024, "bf16")
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("grid", "activations", "rows", "split", "moe"),
    [
        (GridShape(), "full", 2, False, MoeConfig()),
        (GridShape(expert=4), "full", 4, False, MoeConfig()),
        (GridShape(expert=2, y=2), "full", 4, False, CAPACITY),
        pytest.param(GridShape(expert=4), "none", 4, False, MoeConfig(), marks=SLOW),
        pytest.param(GridShape(expert=4), "save_collectives", 4, False, MoeConfig(), marks=SLOW),
        pytest.param(GridShape(x=2), "save_collectives", 4, False, MoeConfig(), marks=SLOW),
        pytest.param(GridShape(expert=2, y=2), "full", 8, True, MoeConfig(), marks=SLOW),
        pytest.param(GridShape(expert=4), "none", 4, False, CAPACITY, marks=SLOW),
        pytest.param(GridShape(expert=4), "save_collectives", 4, False, CAPACITY, marks=SLOW),
    ],
)
def test_memory_of_a_step_is_within_five_per_cent(grid, activations, rows, split, moe):
    sequences = rows * grid.batch_shards
    program = compile_abstract(
        SHAPE, build_grid(grid, jax.devices()[: grid.devices]), optax.adamw(1e-3),
        sequences=sequences, memory=MemoryConfig(activations=activations),
        tensor=TensorConfig(scan_layers="yes"), comm=BlockComm(sequence_split=split), moe=moe,
        compiler_options=keep_recomputation(),
    )  # fmt: skip
    found = program.memory_analysis()
    job = PlanRequest(SHAPE, load_machine("laptop"), sequences, "fp32", sequence_split=split, moe=moe)
    predicted = MemoryModel(job).memory(Candidate(grid, 1, activations)).total
    assert predicted == pytest.approx(found.argument_size_in_bytes + found.temp_size_in_bytes, rel=0.05)


def test_temporaries_of_the_update_do_not_grow_with_the_experts():
    grid = build_grid(GridShape(expert=2, data=2), jax.devices()[:4])
    shape = replace(SHAPE, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=1024, expert_ffn=1024, vocab=1024)

    def temporaries(experts):
        model, _ = abstract(replace(shape, experts=experts), grid, 4, 1)
        memory = MemoryConfig(precision="fp32")
        _, _, step = build_step(model, split_module(model), optax.adamw(1e-3), grid, 1.0, memory, TensorConfig())
        state, program = step.update.abstract(), step.program
        grads = {
            name: jax.ShapeDtypeStruct(
                p.shape, jnp.float32, sharding=NamedSharding(grid.mesh, program.grad_specs[name])
            )
            for name, p in program.parts.params.items()
        }
        factor, finite = (jax.ShapeDtypeStruct((), of, sharding=step.scalar) for of in (jnp.float32, jnp.bool_))
        update = jax.jit(step.update.apply_update, donate_argnums=0)
        return update.lower(state, grads, factor, finite).compile().memory_analysis().temp_size_in_bytes

    few = temporaries(4)
    assert few < 1e6
    assert temporaries(64) == pytest.approx(few, rel=0.05)


def test_grids_split_experts_where_there_are_some():
    found = set(legal_grids(MIXTRAL, 16, SearchSpace(axes={"pipe": 1}), Counter()))
    assert {grid.expert for grid in found} == {1, 2, 4, 8}
    dense = replace(MIXTRAL, shape=preset("llama2-7b"))
    assert {grid.expert for grid in legal_grids(dense, 16, SearchSpace(), Counter())} == {1}


def test_a_search_finds_what_fits_and_prices_it():
    limit = MIXTRAL.memory_limit()
    done = search(MIXTRAL, 64, SearchSpace(axes={"expert": 8, "y": 4}), limit)
    best = done.best[0]
    assert best.candidate.grid.expert == 8
    assert best.memory.total <= limit
    assert best.exposed["expert"] + best.hidden.get("expert", 0.0) > 0
    assert best.peak_share(MIXTRAL) < 1


def test_a_pipeline_is_priced_by_its_own_split_of_experts_whatever_was_priced_before():
    splits = [Candidate(GridShape(pipe=4, data=16 // expert, expert=expert, y=4), 16, "full") for expert in (1, 8)]
    prices = Prices(CostModel(MIXTRAL))
    for candidate in splits:
        assert prices.price(candidate).step_s == Prices(CostModel(MIXTRAL)).price(candidate).step_s


def test_experts_that_are_split_take_less_memory_and_send_more():
    model = CostModel(MIXTRAL)
    one, eight = (
        model.estimate(Candidate(GridShape(data=8 // expert, expert=expert, z=8), 1, "full")) for expert in (1, 8)
    )
    assert eight.memory.weights < 0.3 * one.memory.weights
    assert eight.comm_s["expert"] > one.comm_s["expert"] == 0.0


def test_published_facts_of_ted():
    assert max(ted.state_errors()) < 0.001  # biases, norms and routers are not in the formula
    assert ted.larger_models() == "3.7/4.3, 4.5/5.5, 5.1/6.5"
    facts = {fact.claim: fact.here for fact in ted.facts()}
    assert facts["all-to-alls + all-reduces over y, a layer"] == "6 + 6; kept 4 + 4"
    assert facts["all-to-all bytes without duplicates"] == "0.2500 at Gt = 4"
    assert facts["parameters of the 40B model"] == "38.9B"
    assert facts["40B on 128 V100: faster by both"] == "simulated: 37% to 72% (4 settings)"
