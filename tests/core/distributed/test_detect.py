"""Which processes make up a run: order of sources, cross-checks, refusals. No MPI, no Slurm, no jax needed."""

import pytest

from axonn_jax.core.distributed.processes import (
    World,
    binding_notice,
    detect,
    explicit_world,
    first_slurm_host,
    slurm_notice,
)
from axonn_jax.core.errors import UserError

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
BATCH_SHELL = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def facts(size=4, rank=1, notice=""):
    return lambda: World(rank, size, 1, "127.0.0.1:5000", "MPI", "Open MPI v5.0.11", notice)


def not_asked():
    raise AssertionError("MPI must not be initialised here")


def test_nothing_said_is_one_process_without_mpi():
    world = detect({}, not_asked)
    assert (world.rank, world.size, world.coordinator, world.source) == (0, 1, None, "one process")


def test_mpirun_asks_mpi():
    world = detect(OPEN_MPI, facts())
    assert (world.rank, world.size, world.hosts, world.coordinator) == (1, 4, 1, "127.0.0.1:5000")
    assert world.source == "MPI"
    assert "OMPI_COMM_WORLD_SIZE=4" in world.why


def test_mpirun_of_one_process_is_one_process():
    assert detect({"OMPI_COMM_WORLD_SIZE": "1"}, not_asked).size == 1


def test_mpi_of_another_kind_is_refused_with_both_sizes():
    with pytest.raises(UserError, match=r"OMPI_COMM_WORLD_SIZE = 4: .*which is 1 \(Open MPI"):
        detect(OPEN_MPI, facts(size=1, rank=0))


PMI2 = {"PMI_SIZE": "4", "PMI_RANK": "3"}


def test_srun_with_variables_of_another_mpi_is_a_step_of_slurm():
    world = detect({**SLURM, **PMI2}, facts(size=1, rank=0))
    assert (world.source, world.rank, world.size) == ("Slurm", 3, 4)
    assert detect({**SLURM, **PMI2}, facts(rank=3)).source == "MPI"
    with pytest.raises(UserError, match=r"PMI_SIZE = 4: .*which is 1 .*by `srun --mpi=none`"):
        detect({**BATCH_SHELL, **PMI2}, facts(size=1, rank=0))


def test_processes_of_torchrun_are_refused_with_the_launcher_to_use():
    torch = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(UserError, match=r"^WORLD_SIZE = '2': no such variable: .*`mpirun -n 2` or srun$"):
        detect(torch, not_asked)
    assert detect({**torch, **OPEN_MPI}, facts()).source == "MPI"
    assert detect({**torch, **SLURM}, not_asked).source == "Slurm"
    assert detect({**torch, "WORLD_SIZE": "1"}, not_asked).size == 1


def test_mpirun_inside_a_batch_shell_wins_over_its_slurm_variables():
    world = detect({**BATCH_SHELL, **OPEN_MPI}, facts())
    assert (world.source, world.rank) == ("MPI", 1)
    assert "and are ignored" in world.why


def test_srun():
    world = detect(SLURM, not_asked)
    assert (world.source, world.rank, world.size, world.hosts) == ("Slurm", 3, 4, 2)
    host, port = world.coordinator.rsplit(":", 1)
    assert host == "gpu007"
    assert 49152 <= int(port) < 65536
    assert detect({**SLURM, "SLURM_PROCID": "0"}, not_asked).coordinator == world.coordinator


def test_srun_on_one_node_stays_on_loopback():
    world = detect({**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu007"}, not_asked)
    assert world.coordinator.startswith("127.0.0.1:")


def test_two_steps_of_a_job_get_different_ports():
    assert detect(SLURM, not_asked).coordinator != detect({**SLURM, "SLURM_STEP_ID": "1"}, not_asked).coordinator


def test_incomplete_slurm_variables_are_one_process_and_said_so():
    world = detect(BATCH_SHELL, not_asked)
    assert world.size == 1
    assert "SLURM_STEP_ID" in world.why


@pytest.mark.parametrize(("name", "value"), [("SLURM_NTASKS", "8"), ("SLURM_PROCID", "4")])
def test_contradicting_slurm_variables_are_refused(name, value):
    with pytest.raises(UserError, match=value):
        detect({**SLURM, name: value}, not_asked)


def test_explicit_arguments_win_over_everything():
    world = detect({**SLURM, **OPEN_MPI}, not_asked, explicit_world("node1:1234", 2, 1))
    assert (world.rank, world.size, world.coordinator) == (1, 2, "node1:1234")


@pytest.mark.parametrize(
    ("told", "field"),
    [
        (("node1:1234", 0, 0), "num_processes"),
        (("node1:1234", "2", 0), "num_processes = '2': an integer"),
        (("node1:1234", 2, -1), "process_id = -1: an integer of at least 0"),
        (("node1:1234", 2, 2), "process_id"),
        (("node1", 2, 0), "coordinator"),
    ],
)
def test_bad_explicit_arguments(told, field):
    with pytest.raises(UserError, match=field):
        explicit_world(*told)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu[007-009,12],x1", "gpu007"),
        ("node5", "node5"),
        ("rack[0-1]n[00-15]", "rack0n00"),
        ("rack1-[3-4]-n[1,3],y", "rack1-3-n1"),
        ("n[1-2].cluster", "n1.cluster"),
        ("a1,b2", "a1"),
        ("rack[3]n,other", "rack3n"),
        ("nid[000001,000005-7]", "nid000001"),
    ],
)
def test_first_host_of_a_node_list(nodelist, host):
    assert first_slurm_host(nodelist) == host


@pytest.mark.parametrize(
    ("bound", "offered", "on_cpus", "idle"),
    [
        ([{0}, {1}], range(8), True, "2 processes of this host to 2 of its 8 cores"),  # Open MPI's default for two
        ([{0}, {0}], range(2), True, "2 processes of this host to 1 of its 2 cores"),
        ([{0}, {1}], range(2), True, None),
        ([set(range(8))] * 2, range(8), True, None),
        ([{2, 3}, {4, 5}], range(2, 6), True, None),  # a job's share of a host
        ([set(range(16)), set(range(64, 80))], range(128), True, "to 32 of its 128 cores"),
        ([set(range(16)), set(range(64, 80))], range(128), False, None),  # GPUs: enough for their threads
        ([{0}, {1}], range(128), False, "to 2 of its 128 cores"),
        ([{0}, {1}], (), True, None),  # nobody knows
    ],
)
def test_cores_left_idle_are_one_line_with_the_flag_to_add(bound, offered, on_cpus, idle):
    notice = binding_notice(bound, set(offered), on_cpus=on_cpus)
    if idle is None:
        assert notice == ""
    else:
        assert idle in notice
        assert "mpirun --bind-to none" in notice
        assert "\n" not in notice
        assert detect(OPEN_MPI, facts(notice=notice)).notice == notice


@pytest.mark.parametrize(
    ("variables", "own", "on_cpus", "line"),
    [
        ({"SLURM_CPUS_PER_TASK": "2"}, 1, True, True),
        ({"SLURM_CPUS_PER_TASK": "2"}, 2, True, False),
        ({"SLURM_CPUS_PER_TASK": "64"}, 1, False, True),
        ({"SLURM_CPUS_PER_TASK": "64"}, 8, False, False),  # GPUs: enough for its threads
        ({"SLURM_CPUS_PER_TASK": "2", "SLURM_STEP_ID": ""}, 1, True, False),  # a batch shell's variables
        ({}, 1, True, False),
    ],
)
def test_cores_that_srun_does_not_take_over_from_sbatch_are_a_line(variables, own, on_cpus, line):
    notice = slurm_notice({**SLURM, **variables}, own, on_cpus=on_cpus)
    assert ("`srun -c " in notice) == line == bool(notice)


JOINED = World(1, 4, 1, None, "jax.distributed", "initialised before")


def test_what_jax_has_joined_comes_first():
    assert detect({**SLURM, **OPEN_MPI}, not_asked, initialized=JOINED) is JOINED
    given = detect({}, not_asked, explicit_world("node1:1234", 4, 1), JOINED)
    assert (given.rank, given.size, given.hosts) == (1, 4, JOINED.hosts)
    with pytest.raises(UserError, match=r"OMPI_COMM_WORLD_SIZE = '8': the 4 processes"):
        detect({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "1"}, not_asked, initialized=JOINED)


JAX = {"JAX_COORDINATOR_ADDRESS": "node1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}


def test_variables_of_jax_itself():
    world = detect({**SLURM, **JAX}, not_asked)
    assert (world.rank, world.size, world.coordinator, world.source) == (3, 4, "node1:1234", "JAX variables")
    address = {"JAX_COORDINATOR_ADDRESS": "node1:1234"}
    assert detect({**SLURM, **address}, not_asked).coordinator == "node1:1234"
    assert detect({**OPEN_MPI, **address}, facts()).coordinator == "node1:1234"
    with pytest.raises(UserError, match=r"JAX_COORDINATOR_ADDRESS = 'node1:1234': set together with JAX_NUM_PROCESSES"):
        detect(address, not_asked)
    with pytest.raises(UserError, match=r"JAX_PROCESS_ID = 4: 0 to JAX_NUM_PROCESSES - 1 = 3"):
        detect({**JAX, "JAX_PROCESS_ID": "4"}, not_asked)
