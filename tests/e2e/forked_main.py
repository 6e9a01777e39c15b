# SPDX-License-Identifier: Apache-2.0
"""Runs a main in a fork: ``FORKS -m forked_main FORKS MODULE ARGUMENTS...``, where FORKS makes forks (`surroundings`).

The processes that Ray starts for itself are forks too, which saves half of a run's CPU time. In a user's run these are
plain interpreters, as in runs with `shared=False` (`main_runs`).
"""

import runpy
import sys

from surroundings import ray_starts_forks

if __name__ == "__main__":
    _, forks, *sys.argv = sys.argv
    with ray_starts_forks(forks):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
