# SPDX-License-Identifier: Apache-2.0
"""Where a run's processes put their sockets: with Ray's own of this session, and not in the system's temporary folder.

Ray ends processes without a last word, so that what they would remove stays. There it stays beside Ray's logs of the
run, and goes with them. Shown by tests/e2e/test_one_step_off.py.
"""

from __future__ import annotations

import ray

LONGEST_PATH = 107
"""Bytes of a socket's path that Linux takes (unix(7))."""
LONGEST_NAME = 40
"""Bytes of what vLLM (a UUID) and multiprocessing (a folder and a file) put there."""


def sockets_folder() -> str | None:
    """Ray's on this node; None where Ray is not running, or where paths in it would be too long."""
    node = ray._private.worker._global_node
    folder = None if node is None else str(node.get_sockets_dir_path())
    return folder if folder is not None and len(folder.encode()) + 1 + LONGEST_NAME <= LONGEST_PATH else None
