"""What the processes of a run read to describe a checkpoint and to check data: each file once, by one of them."""

import json
import shutil
import sys
from pathlib import Path

from launched import MPIRUN, UNDER_MPIRUN, command, errors, finished
from saved import check_files

pytestmark = UNDER_MPIRUN


def test_what_a_process_saved_it_alone_reads_again(tmp_path):
    worker = Path(__file__).with_name("save_worker.py")
    done = finished([MPIRUN, "--oversubscribe", "-n", "2", sys.executable, str(worker), str(tmp_path)])
    assert done.returncode == 0, done.stderr[-3000:]
    manifest = check_files(tmp_path / "checkpoints" / "step_00000001")
    read = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    own = [sum(size for path, size in files if f"/ocdbt.process_{rank}/" in path) for rank, files in enumerate(read)]
    assert min(own) > 100_000  # each process's half of 240,000 bytes
    assert own[1] == sum(size for _, size in read[1])
    assert own[0] + own[1] > 0.9 * manifest.bytes
    assert sum(size for files in read for _, size in files) == manifest.bytes
    assert sum(map(len, read)) == len(manifest.files)


def test_what_one_process_finds_in_the_data_ends_all_with_one_line(config, prepared, tmp_path):
    data = Path(shutil.copytree(prepared, tmp_path / "data"))
    with (data / "tokenizer.json").open("a") as file:  # the last process alone reads it
        file.write(" ")
    done = finished(command(config, tmp_path / "run", 2, data_path=data, grid_x=2, train_steps=2))
    assert done.returncode == 2, done.stderr[-3000:]
    (line,) = errors(done.stderr)
    assert "tokenizer.json is corrupt: checksum " in line
    assert not (tmp_path / "run").exists()
