# SPDX-License-Identifier: Apache-2.0
"""What scores answers: reward workers with a process pool, and the sandbox of programming tasks."""
