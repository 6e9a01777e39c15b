# SPDX-License-Identifier: Apache-2.0
"""The engine that the asynchronous modes share. Importing it imports nothing heavy.

Its rooms, from the roof to the ground. A room may import those on lower floors; `make lint` holds that.

    run, verl_v1               a run of this package's mains; parts beside verl's own v1 trainers
    trainer, inspection        the training loop; what a configuration refers to
    logprobs                   sources of proximal log-probs
    rollout                    prompts to trajectories: scheduler, agent-loop workers, client
    model_engine, rewards      log-prob servers; what scores answers
    replicas                   rollout servers
    weights                    trainer to replicas
    recovery                   what stopped is noticed, ended, replaced
    storage, platform          files that last; the machine
    settings                   types, plan, rules (pure)
    core, modes                state machines (pure); which trainer a mode has

What is no engine stands beside it, and it imports none of that: `recipe.laptop`, `recipe.programs`, `recipe.report`,
`recipe.plan`. `recipe.mains` composes runs of both.
"""

__version__ = "0.1.0"
