# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a process group meet: at a port that no connection is given before they do.

verl asks the system for a free port and binds it seconds later (verl/single_controller/ray/base.py:91-110). By then one
of Ray's connections may have it, unless it is below the ports that systems give to connections. Shown by
tests/integration/test_trainer_group.py.
"""

import random


def rendezvous_ports() -> list[int]:
    """First and last of those that verl's ``RayWorkerGroup`` may try, its ``master_port_range``.

    At random, so that groups that start beside each other look in different places.
    """
    return [random.randrange(16_000, 31_000), 32_000]
