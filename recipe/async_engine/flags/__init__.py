# SPDX-License-Identifier: Apache-2.0
"""The modes as trainers of stock verl's main: ``python -m verl.trainer.main_ppo ... +recipe=fully_async``."""
