# SPDX-License-Identifier: Apache-2.0
"""A main in a fork: ``FORKS -m forked_main FORKS MODULE ARGUMENTS...``, where FORKS makes forks (`surroundings`).

What Ray starts for itself are forks too, which saves a run half of its CPU time. A user's run has plain interpreters
there: so have the runs with `shared=False` (`main_runs`).
"""

import runpy
import sys

from surroundings import ray_starts_forks

if __name__ == "__main__":
    _, forks, *sys.argv = sys.argv
    with ray_starts_forks(forks):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
