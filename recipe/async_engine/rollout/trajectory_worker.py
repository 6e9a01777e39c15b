# SPDX-License-Identifier: Apache-2.0
"""Agent-loop workers that hand out one trajectory at a time.

Contract: ``run_trajectory`` returns ``TrajectoryScored``, with what the scheduler decides on, and the payload, which
its caller keeps as an object reference and never unpacks. Where the reward is not there at once it returns
(None, None) when the last token is sampled (its generation slot is free from then on), and
``finish_trajectory`` returns these two. Any of verl's agent loops runs here
unchanged, user-defined ones included; versions come from the client's record, not from the loop. A failing reward is
retried on its own, the answer is kept. Where there are log-prob servers, a trajectory's log-probs travel with it, or
are computed later for one that waits (`rescore`); a server that does not answer fails no trajectory. An agent loop has
a deadline, tools included; one that goes on after it, or after its cancellation, is given up and asks no server again.
After a failure the worker looks whether its process is still sound (`rehearsal`).

Shown by tests/integration/test_trajectory_worker.py and tests/e2e/test_fully_async.py.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from contextvars import copy_context
from typing import Any
from uuid import uuid4

import numpy as np
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker, DictConfigWrap, ToolListWrap
from verl.utils.rollout_trace import rollout_trace_attr

from recipe.async_engine.actors.control import EarlyCancellations, was_restarted
from recipe.async_engine.actors.stacks import waits
from recipe.async_engine.actors.worker_set import WorkerRestarted
from recipe.async_engine.core.columns import REFERENCE, REPORTED, SCORES, VERSION_RUNS
from recipe.async_engine.core.deadlines import CANCELLED_S
from recipe.async_engine.core.plain import told
from recipe.async_engine.core.scoring import STATIC
from recipe.async_engine.core.versions import NOT_SAMPLED, Part, align
from recipe.async_engine.log_prob_servers.client import PartScorer, ResponseScores, ScoringClient, score
from recipe.async_engine.log_prob_servers.service import Unscored
from recipe.async_engine.record.activity import AwayActivity, Work
from recipe.async_engine.record.events import Activity, Away
from recipe.async_engine.rewards.scoring_worker import least_busy_worker
from recipe.async_engine.rollout.group_run import (
    AgentLoopError,
    TrajectoryCancelled,
    TrajectoryDisturbed,
    TrajectoryScored,
)
from recipe.async_engine.rollout.kept_answers import AnswerBook, TokenAccount, TokenFlow, TrajectoryRecord
from recipe.async_engine.rollout.loop_output import (
    INT32,
    NonFiniteReward,
    RewardError,
    check_report,
    check_reward,
    plain_output,
)
from recipe.async_engine.rollout.recorder import TrajectoryRecorder, current_recorder, start_recording
from recipe.async_engine.rollout.rehearsal import MADE_UP, MadeUpAnswers, Rehearsal
from recipe.async_engine.rollout.trajectory_codec import pack, unpack
from recipe.async_engine.rollout.users_loop import (
    OURS,
    check_row,
    contain_exits,
    explained,
    guarded,
    loop_maker,
    run_loop,
)

logger = logging.getLogger(__name__)

REWARD_AT_ONCE_S = 0.03

CANCELLED = (
    "its agent loop was cancelled, and nobody here had asked for that: the loop or one of its tools did it, or another "
    "one's that cancels what is not its own (asyncio.CancelledError)"
)

REWARD_METRIC = "reward"
"""verl's name for the reward itself in ``algorithm.filter_groups.metric``; others are fields of the reward's result."""


class TrajectoryWorker(AgentLoopWorker):
    """verl's agent-loop worker, one trajectory at a time; see the module's contract."""

    reward_loop_worker_handles: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        async_training, limits = self.config.async_training, self.config.async_training.timeouts
        if self.reward_loop_worker_handles:
            self.reward_loop_worker_handles = [least_busy_worker(self.reward_loop_worker_handles)]
        self._reward_timeout_s = float(limits.reward)
        self._reward_attempts = 1 + int(async_training.max_group_retries)
        self._filter_metric = filter_metric(self.config)
        # Of the reward's result, what advantages are computed from beside the reward itself.
        algorithm = self.config.algorithm
        self._reward_fields = tuple(algorithm.gdpo_reward_keys if algorithm.adv_estimator == "gdpo" else ())
        self._trajectory_timeout_s = float(limits.trajectory)
        self._running: dict[str, TrajectoryRecorder] = {}
        self._unwanted = EarlyCancellations()
        self._answers = AnswerBook()
        self._scoring: ScoringClient | None = None
        self._score_parts = False
        self._reference: ScoringClient | None = None
        self._away, self._life = AwayActivity(time.monotonic), uuid4().hex
        with suppress(RuntimeError):  # made where no event loop runs
            contain_exits(asyncio.get_running_loop())
        self._default_loop = self.rollout_config.agent.default_agent_loop
        with suppress(AgentLoopError):  # it is not registered, and rows may name another
            # Its module's own error, at the start.
            loop_maker(self._default_loop)
        self._vocabulary = vocabulary_of(self.model_config)
        self._rehearsal = Rehearsal(self._run_made_up)
        # It may have died with no work, so that nobody has noticed.
        self._is_prepared = not was_restarted()

    async def use_servers(self, servers: dict[str, Any], timeout_s: float, score_parts: bool) -> None:
        """Have log-prob servers, actor handles by name, score trajectories: at once if ``score_parts``."""
        self._scoring = ScoringClient(servers, timeout_s)
        self._score_parts = score_parts

    async def be_prepared(self) -> None:
        """Take work from now on: what the others know was told, or is with the calls before this one."""
        self._is_prepared = True

    async def rehearse(self) -> None:
        """Raise WorkerSpoilt if no trajectory can run here any more."""
        await self._rehearsal.now()

    async def use_reference(self, servers: dict[str, Any], timeout_s: float) -> None:
        """Have servers of the reference policy, actor handles by name, score each finished trajectory."""
        self._reference = ScoringClient(servers, timeout_s)

    async def rescore(self, payload: np.ndarray, version: int, start: int) -> ResponseScores | None:
        """Scores of a finished trajectory's whole padded response by ``version``, the newest published one, or later.

        None if no server answered in time. ``payload``: as :meth:`run_trajectory` yields it. ``start``: of its group;
        the oldest are scored first.
        """
        if self._scoring is None:
            return None
        output = unpack(payload)
        if output.multi_modal_inputs:
            return None
        response = output.response_ids[0].tolist()
        length = int(output.attention_mask[0, -len(response) :].sum())
        prompt = output.prompt_ids[0][output.attention_mask[0, : -len(response)].bool()].tolist()
        try:
            answer = await score(self._scoring, Part(version, prompt, response[:length]), start)
        except Unscored as error:
            logger.warning("a waiting trajectory has no log-probs of version %d: %s", version, error)
            return None
        return ResponseScores.empty(len(response)).with_part(answer, 0, length)

    async def run_trajectory(
        self,
        key: str,
        sample: dict[str, Any],
        sample_index: int,
        rollout_n: int,
        version: int,
        record: TrajectoryRecord | None = None,
        trace: bool = True,
        validate: bool = False,
    ) -> tuple[TrajectoryScored | None, np.ndarray | None]:
        """Run one trajectory; see the module's contract for what is returned.

        Args:
            key: names the trajectory for :meth:`cancel`.
            sample: one row of the data set, as verl's data loader gives it (non-tensor fields).
            sample_index, rollout_n, version: data set index, number in its group and version at issue, for traces.
            record: what :meth:`export` gave for this trajectory in an earlier process.
            trace: whether it is among those that verl's rollout trace has, if that is on.
            validate: sample as for validation; no checkpoint, account or book of tokens has it.

        Raises:
            WorkerRestarted: :meth:`be_prepared` is to come.
            TrajectoryDisturbed: a call was cancelled, and nobody had asked for that.
            WorkerSpoilt: it failed, and so would any other one here.
        """
        if not self._is_prepared:
            raise WorkerRestarted("the agent-loop worker was started again")
        await self._rehearsal.begin()
        if self._unwanted.take(key):
            raise TrajectoryCancelled(f"trajectory {key} was ended on request")
        trajectory = {"step": version, "sample_index": sample_index, "rollout_n": rollout_n, "validate": validate}
        async with self._rehearsal.after_a_failure():
            return await self._until_generated(self._start(key, sample, trajectory, record, trace), key)

    def _start(
        self,
        key: str,
        sample: dict[str, Any],
        trajectory: dict[str, Any],
        record: TrajectoryRecord | None,
        trace: bool,
    ) -> TrajectoryRecorder:
        """Start its agent loop; ``trajectory`` is what verl's traces have of it."""
        context, version = copy_context(), trajectory["step"]
        fields = dict(sample)
        agent_name = str(found) if is_given(found := fields.pop("agent_name", None)) else self._default_loop
        if trajectory["validate"]:
            recorder = context.run(start_recording, work=Work.VALIDATION)
        else:
            scorer = PartScorer(self._scoring, version) if self._scoring is not None and self._score_parts else None
            recorder = context.run(
                start_recording,
                scorer,
                self._answers.begin(key, record),
                Work.NEW if is_first_attempt(key) else Work.RETRY,
                self._away.tool_time(agent_name),
                group_of(key),
            )
        work = guarded(self._run_row, agent_name, trajectory, fields, recorder, trace)
        recorder.task = asyncio.create_task(work, name=f"trajectory {key}", context=context)
        self._running[key] = recorder
        return recorder

    async def _until_generated(
        self, running: TrajectoryRecorder, key: str
    ) -> tuple[TrajectoryScored | None, np.ndarray | None]:
        try:
            await self._until_sampled(running, key)
            if running.sampled.done():
                # A second call costs both ends about as much as the rest of a short trajectory.
                await asyncio.wait({running.task}, timeout=REWARD_AT_ONCE_S)
                if not running.task.done():
                    return None, None
        except asyncio.CancelledError:
            self._end(key, running, complete=False)
            raise TrajectoryDisturbed(CANCELLED) from None
        except BaseException:
            self._end(key, running, complete=False)
            raise
        return await self._finish(key)

    async def finish_trajectory(self, key: str) -> tuple[TrajectoryScored, np.ndarray]:
        """The end of a trajectory whose last token is sampled; see the module's contract.

        Raises:
            WorkerRestarted: it was begun in another process.
            WorkerSpoilt: it failed, and so would any other one here.
        """
        async with self._rehearsal.after_a_failure():
            return await self._finish(key)

    async def _finish(self, key: str) -> tuple[TrajectoryScored, np.ndarray]:
        running = self._running.get(key)
        if running is None:
            raise WorkerRestarted(f"trajectory {key} was begun before the agent-loop worker was started again")
        complete = False
        try:
            output = await self._result(running, key)
            ended = self._scored(output, running), pack(output)
            complete = True
            return ended
        except asyncio.CancelledError:
            raise TrajectoryDisturbed(CANCELLED) from None
        finally:
            self._end(key, running, complete)

    def _end(self, key: str, running: TrajectoryRecorder, complete: bool) -> None:
        running.task.cancel()
        running.drop_scores()
        running.tools.leave()
        self._running.pop(key, None)
        if running.validates:
            running.answers.over = True
        else:
            self._answers.end(key, complete)
        running.over.set()

    async def _until_sampled(self, running: TrajectoryRecorder, key: str) -> None:
        """Wait for the trajectory's last token, or its end.

        Raises:
            AgentLoopError: it has taken longer than it may.
        """

        def now() -> float:
            """Time between generation turns counts for no deadline, but for a validation's, which has just that."""
            return time.monotonic() - (0.0 if running.validates else self.llm_client.gate.held_s)

        deadline = now() + self._trajectory_timeout_s
        awaited = {running.task, running.sampled, running.told}
        while (left_s := deadline - now()) > 0:
            if (await asyncio.wait(awaited, timeout=left_s, return_when=asyncio.FIRST_COMPLETED))[0]:
                return
        await _cancel(running.task, key)
        raise AgentLoopError(
            f"its agent loop was not done within {self._trajectory_timeout_s:g} s; look at its tools, or raise "
            "async_training.timeouts.trajectory"
        )

    @staticmethod
    async def _result(running: TrajectoryRecorder, key: str) -> Any:
        await asyncio.wait({running.task, running.told}, return_when=asyncio.FIRST_COMPLETED)
        if running.told.done():
            await _cancel(running.task, key)
            raise TrajectoryCancelled(f"trajectory {key} was ended on request")
        if running.task.cancelled():
            raise TrajectoryDisturbed(CANCELLED)
        error = running.task.exception()
        if error is None:
            return running.task.result()
        raise error if isinstance(error, OURS) else explained(AgentLoopError, "", error)

    async def activity(self) -> Activity:
        """What its trajectories were at, when at no engine, since this was asked last."""
        return Activity(time.monotonic(), self._life, self._away.lane.take())

    async def describe(self) -> list[str]:
        """Lines: what runs and where the coroutines wait."""
        return [f"trajectories: {', '.join(self._running) or 'none'}", *(f"tasks: {line}" for line in waits())]

    async def cancel(self, keys: list[str]) -> None:
        """End the named trajectories; each one's caller sees the cancellation as its error."""
        for key in keys:
            if key not in self._running:
                self._unwanted.add(key)
            elif not self._running[key].told.done():
                self._running[key].told.set_result(None)

    async def export(self, timeout_s: float) -> tuple[dict[str, TrajectoryRecord | None], TokenAccount]:
        """What each unfinished trajectory has been answered, requests under way included, and the account of now."""
        await self.llm_client.fetch(self._answers.flights(), timeout_s)
        return self._answers.export(), self._answers.account()

    async def close_books(self) -> TokenFlow:
        """The run is over: end every trajectory, as one that was unfinished, and tell what became of their tokens."""
        self._answers.close()
        under_way = [asyncio.create_task(running.over.wait()) for running in self._running.values()]
        await self.cancel(list(self._running))
        if under_way:
            await asyncio.wait(under_way, timeout=CANCELLED_S)
        return self._answers.flow()

    async def hold(self) -> TokenAccount:
        """The generation turn is over: hold every request from now on; returns the account of this moment."""
        if not self.llm_client.gate.is_held:
            self.llm_client.gate.hold()
            self._answers.interrupted_in_tools(
                sum(
                    not (running.sampled.done() or running.answers.flights)
                    for running in self._running.values()
                    if not running.validates
                )
            )
        return self._answers.account()

    async def go_on(self) -> None:
        """A generation turn begins: let the requests that are held go on."""
        self.llm_client.gate.go_on()

    async def _run_row(
        self,
        agent_name: str,
        trajectory: dict[str, Any],
        row: dict[str, Any],
        recorder: TrajectoryRecorder,
        trace: bool,
    ) -> Any:
        """As verl's ``_run_agent_loop``, with a loop's class looked up once: Hydra takes a millisecond or more."""
        with rollout_trace_attr(**trajectory, name="agent_loop", trace=trace):
            check_row(row, None if trajectory["validate"] else self.config.actor_rollout_ref.rollout.get("n"))
            agent_loop = loop_maker(agent_name)(
                trainer_config=DictConfigWrap(config=self.config),
                server_manager=self.llm_client,
                tokenizer=self.tokenizer,
                processor=self.processor,
                hf_model_type=self.hf_model_type,
                dataset_cls=self.dataset_cls,
                data_config=DictConfigWrap(self.config.data),
                tools=ToolListWrap(self.tools),
            )
            v1 = {"session_id": trajectory["rollout_n"], "global_steps": trajectory["step"]}
            returned = await run_loop(agent_loop, self._sampling_params(trajectory["validate"]), row, **v1)
            recorder.tools.end()
            recorder.sampled.set_result(None)
            return await self._finished(plain_output(returned, self.rollout_config, self._vocabulary), row, recorder)

    def _sampling_params(self, validate: bool) -> dict[str, Any]:
        config = self.rollout_config
        of = config.val_kwargs if validate else config
        return {
            "temperature": of.temperature,
            "top_p": of.top_p,
            "top_k": of.top_k,
            "repetition_penalty": 1.0,
            "logprobs": config.calculate_log_probs,
        }

    async def _run_made_up(self) -> Any:
        recorder = start_recording(answers=MadeUpAnswers(), work=Work.VALIDATION)
        trajectory = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": True}
        return await self._run_row("single_turn_agent", trajectory, MADE_UP, recorder, trace=False)

    async def _finished(self, output: AgentLoopOutput, row: dict[str, Any], recorder: TrajectoryRecorder) -> Any:
        """The padded trajectory with its versions, reward and log-probs."""
        alignment = align(recorder.segments, output.response_ids, output.response_mask)
        output.extra_fields[VERSION_RUNS] = alignment.runs
        output.extra_fields["exact_versions"] = alignment.exact
        output.extra_fields["min_global_steps"] = alignment.oldest
        output.extra_fields["max_global_steps"] = alignment.newest
        reference = asyncio.create_task(self._reference_scores(recorder, output))
        try:
            # The row as one argument, whatever its columns are called; `_compute_score` takes it out again.
            padded = await self._agent_loop_postprocess(
                output, recorder.validates, raw_prompt=row.get("raw_prompt"), row=row
            )
            with nullcontext() if recorder.validates else self._away.at(Away.LOG_PROBS):
                scores = {REFERENCE: await reference}
                if recorder.scorer is not None:
                    collected = recorder.scorer.collect(output.prompt_ids, output.response_ids, output.response_mask)
                    scores[SCORES] = await collected
        finally:
            reference.cancel()
        padded.extra_fields.update({name: found for name, found in scores.items() if found is not None})
        return padded

    async def _reference_scores(self, recorder: TrajectoryRecorder, output: AgentLoopOutput) -> np.ndarray | None:
        """The reference policy's log-probs of the response, float32 (R,); None if no server gives them."""
        if self._reference is None or not recorder.text_only or recorder.validates:
            return None
        part = Part(STATIC, output.prompt_ids, output.response_ids)
        with suppress(Unscored):
            return (await score(self._reference, part, output.extra_fields["min_global_steps"])).scores[0]
        return None

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict[str, Any]) -> None:
        """As verl's, with a deadline and retries.

        Raises:
            RewardError: every attempt failed; it says what the last one did.
            NonFiniteReward: it is no number.
        """
        if kwargs["row"] is MADE_UP:
            return
        recorder = current_recorder()
        validates = recorder is not None and recorder.validates
        for attempt in range(1, self._reward_attempts + 1):
            try:
                with nullcontext() if validates else self._away.at(Away.REWARD):
                    async with asyncio.timeout(self._reward_timeout_s):
                        await super()._compute_score(outputs, kwargs["row"])
                self._check_reward(outputs[-1], () if validates else self._reward_fields)
                return
            except NonFiniteReward:
                raise
            except TimeoutError:
                cause: Exception = TimeoutError(
                    f"no reward within {self._reward_timeout_s:g} s (async_training.timeouts.reward)"
                )
            except Exception as error:  # a user's reward function may raise anything; the last one is reported
                cause = error
            logger.warning("reward attempt %d of %d failed: %s", attempt, self._reward_attempts, told(cause))
        raise explained(RewardError, f"the reward failed {self._reward_attempts} times, last with ", cause)

    def _check_reward(self, output: AgentLoopOutput, trained: Sequence[str]) -> None:
        if output.reward_score is None and not self.reward_loop_worker_handles:
            # The trainer computes it.
            return
        report = output.extra_fields.get(REPORTED)
        check_report(report)
        check_reward(output.reward_score, report or {}, trained)
        output.reward_score = float(output.reward_score)

    def _metric_of(self, output: Any, metric: str) -> float:
        found = {**(output.extra_fields.get(REPORTED) or {}), REWARD_METRIC: output.reward_score}
        if found.get(metric) is None:
            raise RewardError(
                f"algorithm.filter_groups.metric={metric} is not among what the reward gave "
                f"({', '.join(sorted(map(str, found)))}); have the reward function return it, or name one of those"
            )
        check_reward(output.reward_score, found, [metric])
        return float(found[metric])

    def _scored(self, output: Any, recorder: TrajectoryRecorder) -> TrajectoryScored:
        metric = None if recorder.validates else self._filter_metric
        return TrajectoryScored(
            score=output.reward_score,
            oldest_version=output.extra_fields["min_global_steps"],
            newest_version=output.extra_fields["max_global_steps"],
            exact_versions=output.extra_fields["exact_versions"],
            interruptions=recorder.interruptions,
            reprefilled_tokens=recorder.reprefilled_tokens,
            response_tokens=int(output.attention_mask[0, -output.response_ids.shape[1] :].sum()),
            cut_tokens=recorder.cut_tokens,
            recovered_tokens=recorder.recovered_tokens,
            restored_tokens=recorder.answers.restored_tokens,
            filter_metric=None if metric is None else self._metric_of(output, metric),
            sampled_tokens=sum(n for version, n in output.extra_fields[VERSION_RUNS] if version != NOT_SAMPLED),
            received_tokens=recorder.answers.received_tokens,
            tool_s=recorder.tools.seconds,
            asked_s=recorder.asked_s,
        )


async def _cancel(task: asyncio.Task[Any], key: str) -> None:
    """End a trajectory's agent loop; one that does not end is left behind."""
    task.cancel()
    await asyncio.wait({task}, timeout=CANCELLED_S)
    if not task.done():
        logger.error("the agent loop of trajectory %s goes on after its cancellation: it is given up", key)
        # Whatever it ends with some day, nobody asks.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())


def group_of(key: str) -> int:
    """The number of the group, in the order of issue, that this call's key names."""
    return int(key.partition("-")[0])


def is_first_attempt(key: str) -> bool:
    """Whether this call's key, of group, number in it and attempt, is of a trajectory's first attempt."""
    return key.endswith("-0")


def filter_metric(config: Any) -> str | None:
    """What groups are filtered by; None if they are not."""
    settings = OmegaConf.select(config, "algorithm.filter_groups")
    return str(settings.metric) if settings is not None and settings.get("enable") else None


def is_given(value: Any) -> bool:
    """Whether a column has a value in a row: files that are read together need not have the same columns."""
    return value is not None and value != "" and value == value


def vocabulary_of(model_config: Any) -> int:
    """How many tokens the model knows; as many as a batch can hold where its configuration does not say."""
    config = getattr(model_config, "hf_config", None)
    config = getattr(config, "text_config", None) or config
    return getattr(config, "vocab_size", None) or INT32
