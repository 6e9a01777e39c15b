# SPDX-License-Identifier: Apache-2.0
"""What happens when a part stops: it is noticed, what is left of it is ended, and another one takes its place."""
