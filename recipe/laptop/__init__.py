# SPDX-License-Identifier: Apache-2.0
"""What a run needs where there is no accelerator: a platform for verl, a transfer of weights, forks, and a task."""
