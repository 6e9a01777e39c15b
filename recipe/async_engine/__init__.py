# SPDX-License-Identifier: Apache-2.0
"""The engine that the asynchronous modes share. Importing it imports nothing heavy.

These are its packages. Each may import those in the rows below it; `make lint` checks that.

    run, v1                    a run of this package's mains; parts beside verl's own v1 trainers
    trainer, inspection        the training loop, with its sources of proximal log-probs; what a configuration refers to
    rollout                    prompts to trajectories: scheduler, agent-loop workers, client
    log_prob_servers, rewards  log-prob servers; what scores answers
    engines                    rollout servers; vLLM's in engines/vllm
    weights                    trainer to replicas
    actors                     what stopped is noticed, ended, replaced
    record                     files that last: a run's record, its checkpoints' contents
    config                     types, plan, rules (pure); Hydra's groups
    core, modes                state machines (pure); which trainer a mode has

The engine imports none of the packages beside it: `recipe.laptop`, `recipe.programs`, `recipe.report`, `recipe.plan`.
`recipe.mains` composes runs of the engine and of these.
"""

__version__ = "0.1.0"
