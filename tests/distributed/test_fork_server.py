"""The process that ranks are forked from: what it does when a job ends."""

from __future__ import annotations

import psutil

LEAVES_A_CHILD = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
print("child", child.pid, flush=True)
if os.environ["RANK"] == "1":
    sys.exit({status})
"""


def test_nothing_that_a_rank_started_outlives_its_job(server, tmp_path):
    for status in (0, 3):
        program = tmp_path / f"leaves_a_child_{status}.py"
        program.write_text(LEAVES_A_CHILD.format(status=status))
        job = server.run(program, 2)
        assert job.statuses[1] == status
        children = [int(line.split()[1]) for line in job.output.splitlines() if line.startswith("child")]
        assert children
        alive = [psutil.Process(pid) for pid in children if psutil.pid_exists(pid)]
        gone, alive = psutil.wait_procs(alive, timeout=10)
        assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive), alive
