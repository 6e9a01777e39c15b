# SPDX-License-Identifier: Apache-2.0
"""Where runs are composed: the modes' own mains, and the modes as trainers of stock verl's main, chosen by a flag.

The engine imports neither this package nor what is composed here. A flag: ``verl.trainer.main_ppo +recipe=...``.
"""
