# SPDX-License-Identifier: Apache-2.0
"""Agent-loop workers, the Ray actors that run trajectories, with one call for each trajectory.

Contract: ``run_trajectory`` returns two objects: a ``TrajectoryScored``, which the scheduler reads, and the payload,
which is the packed trajectory. The scheduler keeps only an object reference to the payload. If the reward is not ready
soon after the last token is sampled, ``run_trajectory`` returns (None, None), so that the generation slot becomes free,
and ``finish_trajectory`` returns the two objects later.

Any agent loop for verl, including a user's, runs here unchanged. The client through which agent loops reach the rollout
servers records which version sampled each token (`TrajectoryRecorder`), because agent loops do not know the versions.
If an agent loop returns a list of outputs, each output becomes a row of the batch. The reward is computed once, for the
last output. The other outputs get the same reward unless they have rewards of their own. That is verl's rule
(trainer/ppo/v1/agent_loop_tq.py:115), except that verl overwrites the others' own rewards. If a reward function fails,
only the reward is computed again, for the same answer. Log-prob servers, if there are any, score answers while the
trajectory runs, or score finished trajectories later (`rescore`). If a log-prob server does not answer, the trajectory
succeeds without the server's log-probs. An agent loop has a deadline, which includes its tools. An agent loop that
continues after its deadline or its cancellation is abandoned, and can send no further requests. After a failure the
worker tests whether its process can still run a trajectory (`rehearsal`). Shown by
tests/integration/test_trajectory_worker.py and tests/e2e/test_fully_async.py.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
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
from recipe.async_engine.actors.worker_set import WorkerDied, WorkerRestarted
from recipe.async_engine.core.columns import REFERENCE, REPORTED, SCORES, VERSION_RUNS
from recipe.async_engine.core.deadlines import CANCELLED_S
from recipe.async_engine.core.plain import told
from recipe.async_engine.core.scoring import STATIC
from recipe.async_engine.core.versions import NOT_SAMPLED, Part, align, align_in
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
from recipe.async_engine.rollout.kept_answers import (
    AnswerBook,
    TokenAccount,
    TrajectoryRecord,
    TrajectoryRecorder,
    current_recorder,
    start_recording,
)
from recipe.async_engine.rollout.loop_output import (
    INT32,
    NonFiniteReward,
    RewardError,
    check_report,
    check_reward,
    plain_outputs,
)
from recipe.async_engine.rollout.rehearsal import MADE_UP, MadeUpAnswers, Rehearsal
from recipe.async_engine.rollout.teachers import TeacherError
from recipe.async_engine.rollout.trajectory_codec import pack, unpack
from recipe.async_engine.rollout.users_loop import (
    DO_SAMPLE,
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
    "the agent loop was cancelled (asyncio.CancelledError), but not by this package: by the loop itself, by one of its "
    "tools, or by the code of another trajectory"
)

GREEDY = {"top_p": 1.0, "top_k": -1, "temperature": 0}
"""Sampling parameters of a row whose column ``__do_sample__`` is false, as in verl (agent_loop_tq.py:42)."""

REWARD_METRIC = "reward"
"""Value of ``algorithm.filter_groups.metric`` that means the reward itself. Any other value is the name of a field in
the reward function's result.
"""
MOST_DEATHS = 2
"""How many times, for one call, the death of the reward worker or teacher's server does not count as an attempt."""


class TrajectoryWorker(AgentLoopWorker):
    """verl's agent-loop worker, extended by calls for single trajectories."""

    reward_loop_worker_handles: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        async_training, limits = self.config.async_training, self.config.async_training.timeouts
        if self.reward_loop_worker_handles:
            self.reward_loop_worker_handles = [least_busy_worker(self.reward_loop_worker_handles)]
        self._reward_timeout_s = float(limits.reward)
        self._reward_attempts = 1 + int(async_training.max_group_retries)
        self._filter_metric = filter_metric(self.config)
        # Advantages are computed from the score and from these fields of the reward function's result.
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
        with suppress(RuntimeError):  # some tests make a worker without a running event loop
            contain_exits(asyncio.get_running_loop())
        self._default_loop = self.rollout_config.agent.default_agent_loop
        with suppress(AgentLoopError):  # the default loop may be missing if rows of the data name other loops
            # Import the default agent loop's module now, so that an error in the module is raised at once.
            loop_maker(self._default_loop)
        self._vocabulary = vocabulary_of(self.model_config)
        self._rehearsal = Rehearsal(self._run_made_up)
        # A restarted worker has lost its settings, so it refuses trajectories until `be_prepared` is called.
        self._is_prepared = not was_restarted()

    async def use_servers(self, servers: dict[str, Any], timeout_s: float, score_parts: bool) -> None:
        """Use ``servers`` (actor handles by name) as log-prob servers.

        With ``score_parts`` they score each answer as soon as it arrives. Otherwise they score only finished
        trajectories, when `rescore` is called. A server that does not answer within ``timeout_s`` seconds is skipped.
        """
        self._scoring = ScoringClient(servers, timeout_s)
        self._score_parts = score_parts

    async def be_prepared(self) -> None:
        """Accept trajectories from now on. This is called when a restarted worker has all its settings again."""
        self._is_prepared = True

    async def rehearse(self) -> None:
        """Raise WorkerSpoilt if this worker's process can no longer run a trajectory."""
        await self._rehearsal.now()

    async def use_reference(self, servers: dict[str, Any], timeout_s: float) -> None:
        """Use ``servers`` (actor handles by name) to compute the reference policy's log-probs of each trajectory."""
        self._reference = ScoringClient(servers, timeout_s)

    async def use_teachers(self, servers: Mapping[str, Sequence[Any]]) -> None:
        """Use ``servers`` as the teachers' servers: a list of actor handles for each teacher, by verl's teacher key."""
        for key, handles in servers.items():
            self.teacher_client[key].use(handles)

    async def rescore(self, payload: np.ndarray, version: int, start: int) -> list[ResponseScores | None] | None:
        """Have log-prob servers score a finished trajectory with the weights of ``version`` or of a later version.

        Args:
            payload: the payload that :meth:`run_trajectory` returned.
            version: the newest published version.
            start: the version of the oldest token in the trajectory's group. Servers score the oldest groups first.

        Returns:
            A list with an item for each output: log-probs and entropies of its padded response, or None if no server
                answered in time or the output has multi-modal inputs. Without log-prob servers the result is None.
        """
        scoring = self._scoring
        if scoring is None:
            return None
        outputs = unpack(payload)
        return list(await asyncio.gather(*(self._rescored(scoring, each, version, start) for each in outputs)))

    @staticmethod
    async def _rescored(scoring: ScoringClient, output: Any, version: int, start: int) -> ResponseScores | None:
        if output.multi_modal_inputs:
            return None
        response = output.response_ids[0].tolist()
        length = int(output.attention_mask[0, -len(response) :].sum())
        prompt = output.prompt_ids[0][output.attention_mask[0, : -len(response)].bool()].tolist()
        try:
            answer = await score(scoring, Part(version, prompt, response[:length]), start)
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
        """Run one trajectory until its last token is sampled. If the reward is ready soon after that, wait for it too.

        Args:
            key: the name of this attempt at the trajectory, for :meth:`cancel` and :meth:`finish_trajectory`.
            sample: one row of verl's data loader, without tensors.
            sample_index: the index of the row in the data set, for traces.
            rollout_n: the number of the trajectory in its group.
            version: the newest version at the time when the group's generation started.
            record: the answers that :meth:`export` returned for this trajectory before the run was restarted, if any.
            trace: whether verl's rollout trace, if it is on, includes this trajectory.
            validate: whether the trajectory belongs to a validation. It then uses the sampling parameters of validation
                and is left out of checkpoints and token counts.

        Returns:
            The result and the payload, or (None, None) if the reward is not known yet.

        Raises:
            WorkerRestarted: the worker was restarted, and :meth:`be_prepared` has not been called since.
            TrajectoryDisturbed: the trajectory was cancelled, but not by :meth:`cancel`.
            WorkerSpoilt: the trajectory failed, and the process can no longer run a trajectory.
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
        """Start the task of a trajectory's agent loop. ``trajectory`` has the attributes for verl's rollout trace."""
        context, version = copy_context(), trajectory["step"]
        fields = dict(sample)
        agent_name = str(found) if is_given(found := fields.pop("agent_name", None)) else self._default_loop
        if trajectory["validate"]:
            recorder = TrajectoryRecorder(work=Work.VALIDATION)
        else:
            scorer = PartScorer(self._scoring, version) if self._scoring is not None and self._score_parts else None
            recorder = self._answers.begin(
                key,
                record,
                scorer=scorer,
                work=Work.NEW if is_first_attempt(key) else Work.RETRY,
                tools=self._away.tool_time(agent_name),
                order=group_of(key),
            )
        context.run(start_recording, recorder)
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
                # If the reward comes soon, return it with this call. A further call (`finish_trajectory`) would double
                # the overhead of a short trajectory.
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
        """Return the result and the payload of a trajectory whose last token is sampled.

        Raises:
            WorkerRestarted: the worker was restarted after the trajectory began.
            WorkerSpoilt: the trajectory failed, and the process can no longer run a trajectory.
        """
        async with self._rehearsal.after_a_failure():
            return await self._finish(key)

    async def _finish(self, key: str) -> tuple[TrajectoryScored, np.ndarray]:
        running = self._running.get(key)
        if running is None:
            raise WorkerRestarted(f"trajectory {key} was begun before the agent-loop worker was started again")
        complete = False
        try:
            outputs = await self._result(running, key)
            ended = self._scored(outputs, running), pack(outputs)
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
        if not running.validates:
            self._answers.end(key, complete)
        running.over.set()

    async def _until_sampled(self, running: TrajectoryRecorder, key: str) -> None:
        """Wait until the last token is sampled, the trajectory has failed, or its cancellation has been requested.

        Raises:
            AgentLoopError: the trajectory exceeded its deadline.
        """

        def now() -> float:
            """Return the time in seconds. For a training trajectory, it does not advance while requests are held."""
            return time.monotonic() - (0.0 if running.validates else self.llm_client.gate.held_s)

        deadline = now() + self._trajectory_timeout_s
        awaited = {running.task, running.sampled, running.told}
        while (left_s := deadline - now()) > 0:
            if (await asyncio.wait(awaited, timeout=left_s, return_when=asyncio.FIRST_COMPLETED))[0]:
                return
        await _cancel(running.task, key)
        raise AgentLoopError(
            f"the agent loop was not done within {self._trajectory_timeout_s:g} s; look at its tools, or raise "
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
        """Return when, since the last call, trajectories of this worker waited for tools, rewards or log-probs."""
        return Activity(time.monotonic(), self._life, self._away.lane.take())

    async def describe(self) -> list[str]:
        return [f"trajectories: {', '.join(self._running) or 'none'}", *(f"tasks: {line}" for line in waits())]

    async def cancel(self, keys: list[str]) -> None:
        """Cancel the trajectories with these keys. Their open calls raise TrajectoryCancelled."""
        for key in keys:
            if key not in self._running:
                self._unwanted.add(key)
            elif not self._running[key].told.done():
                self._running[key].told.set_result(None)

    async def export(self, timeout_s: float) -> tuple[dict[str, TrajectoryRecord | None], TokenAccount]:
        """Return the answers of each unfinished trajectory, by key, and the worker's token counts (`TokenAccount`).

        For an open request, the tokens that the server has sampled so far are included. At most ``timeout_s`` seconds
        are spent on fetching them.
        """
        await self.llm_client.fetch(self._answers.flights(), timeout_s)
        return self._answers.export(), self._answers.account()

    async def close_books(self) -> TokenAccount | None:
        """Cancel all trajectories, because the run is over, and return this worker's token counts.

        In these counts, the tokens of the cancelled trajectories are ``unfinished`` (`TokenAccount`). The result is
        None if the worker was restarted, because the counts of its earlier process are lost.
        """
        self._answers.close()
        under_way = [asyncio.create_task(running.over.wait()) for running in self._running.values()]
        await self.cancel(list(self._running))
        if under_way:
            await asyncio.wait(under_way, timeout=CANCELLED_S)
        return None if was_restarted() else self._answers.account()

    async def hold(self) -> TokenAccount:
        """Hold the requests of training trajectories until `go_on`; return the worker's `TokenAccount`."""
        if not self.llm_client.gate.is_held:
            self.llm_client.gate.hold()
            self._answers.interrupted_in_tools(
                sum(
                    not (running.sampled.done() or running.flights)
                    for running in self._running.values()
                    if not running.validates
                )
            )
        return self._answers.account()

    async def go_on(self) -> None:
        self.llm_client.gate.go_on()

    async def _run_row(
        self,
        agent_name: str,
        trajectory: dict[str, Any],
        row: dict[str, Any],
        recorder: TrajectoryRecorder,
        trace: bool,
    ) -> Any:
        """Run an agent loop for a row, like verl's ``_run_agent_loop``.

        The class of the agent loop is cached, because verl's way to look it up with Hydra takes a millisecond.
        """
        with rollout_trace_attr(**trajectory, name="agent_loop", trace=trace):
            check_row(row)
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
            returned = await run_loop(agent_loop, self._sampling_params(trajectory["validate"], row), row, **v1)
            recorder.tools.end()
            recorder.sampled.set_result(None)
            outputs = plain_outputs(returned, self.rollout_config, self._vocabulary)
            return await self._finished(outputs, row, recorder)

    def _sampling_params(self, validate: bool, row: dict[str, Any]) -> dict[str, Any]:
        config = self.rollout_config
        of = config.val_kwargs if validate else config
        wants_sampling = row.get(DO_SAMPLE)
        greedy = {} if validate or wants_sampling is None or bool(wants_sampling) else GREEDY
        return {
            "temperature": of.temperature,
            "top_p": of.top_p,
            "top_k": of.top_k,
            "repetition_penalty": 1.0,
            "logprobs": config.calculate_log_probs,
            **greedy,
        }

    async def _run_made_up(self) -> Any:
        recorder = start_recording(MadeUpAnswers(work=Work.VALIDATION))
        trajectory = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": True}
        return await self._run_row("single_turn_agent", trajectory, MADE_UP, recorder, trace=False)

    async def _finished(
        self, outputs: list[AgentLoopOutput], row: dict[str, Any], recorder: TrajectoryRecorder
    ) -> list[Any]:
        """Return the outputs of an agent loop, padded, with rewards, versions and log-probs added."""
        if len(outputs) > 1:
            await self._compute_score(outputs, {"row": row})
            _share_reward(outputs)
        return [await self._padded(output, row, recorder, len(outputs) > 1) for output in outputs]

    async def _padded(
        self, output: AgentLoopOutput, row: dict[str, Any], recorder: TrajectoryRecorder, is_one_of_several: bool
    ) -> Any:
        if is_one_of_several:
            pieces = recorder.segments, recorder.contexts, output.prompt_ids
            alignment = align_in(*pieces, output.response_ids, output.response_mask)
        else:
            alignment = align(recorder.segments, output.response_ids, output.response_mask)
        output.extra_fields[VERSION_RUNS] = alignment.runs
        output.extra_fields["exact_versions"] = alignment.exact
        output.extra_fields["min_global_steps"] = alignment.oldest
        output.extra_fields["max_global_steps"] = alignment.newest
        wants_reference = self._reference is not None and recorder.text_only and not recorder.validates
        reference = asyncio.create_task(self._reference_scores(output)) if wants_reference else None
        try:
            # The row is passed as one argument, so that its columns may have any names. `_compute_score` unpacks it.
            padded = await self._agent_loop_postprocess(
                output, recorder.validates, raw_prompt=row.get("raw_prompt"), row=row
            )
            if reference is None and recorder.scorer is None:
                return padded
            with self._away.at(Away.LOG_PROBS):
                if reference is not None and (found := await reference) is not None:
                    padded.extra_fields[REFERENCE] = found
                if recorder.scorer is not None:
                    collected = recorder.scorer.collect(output.prompt_ids, output.response_ids, output.response_mask)
                    if (scores := await collected) is not None:
                        padded.extra_fields[SCORES] = scores
        finally:
            if reference is not None:
                reference.cancel()
        return padded

    async def _reference_scores(self, output: AgentLoopOutput) -> np.ndarray | None:
        """Return the reference policy's log-probs of the response, one float32 for each token, or None.

        None means that no server answered.
        """
        assert self._reference is not None
        part = Part(STATIC, output.prompt_ids, output.response_ids)
        with suppress(Unscored):
            return (await score(self._reference, part, output.extra_fields["min_global_steps"])).scores[0]
        return None

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict[str, Any]) -> None:
        """Compute the reward like verl, but with a deadline and retries.

        Raises:
            RewardError: every attempt failed. The message has the error of the last attempt.
            NonFiniteReward: the reward is not a finite number.
        """
        if kwargs["row"] is MADE_UP:
            return
        recorder = current_recorder()
        validates = recorder is not None and recorder.validates
        attempts, deaths = 0, 0
        while attempts < self._reward_attempts:
            attempts += 1
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
            except Exception as error:  # a user's reward function may raise anything
                cause = error
                if isinstance(error, WorkerDied) and deaths < MOST_DEATHS:
                    deaths, attempts = deaths + 1, attempts - 1
            logger.warning("reward attempt %d of %d failed: %s", attempts, self._reward_attempts, told(cause))
        raise explained(RewardError, f"the reward failed {self._reward_attempts} times, last with ", cause)

    async def _compute_teacher_logprobs(
        self,
        output: AgentLoopOutput,
        prompt_ids: list[int],
        response_ids: list[int],
        validate: bool,
        sample_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Ask the row's teacher like verl, but with a deadline and retries.

        Raises:
            TeacherError: every attempt failed. The message has the error of the last attempt.
        """
        if validate or not self.distillation_enabled:
            return
        assert sample_kwargs is not None
        row, attempts, deaths = sample_kwargs["row"], 0, 0
        while attempts < self._reward_attempts:
            attempts += 1
            try:
                with self._away.at(Away.LOG_PROBS):
                    async with asyncio.timeout(self._reward_timeout_s):
                        await super()._compute_teacher_logprobs(output, prompt_ids, response_ids, validate, row)
                return
            except TimeoutError:
                cause: Exception = TimeoutError(
                    f"no log-probs within {self._reward_timeout_s:g} s (async_training.timeouts.reward)"
                )
            except Exception as error:  # an engine may raise anything
                cause = error
                if isinstance(error, WorkerDied) and deaths < MOST_DEATHS:
                    deaths, attempts = deaths + 1, attempts - 1
            logger.warning("attempt %d of %d at the teacher failed: %s", attempts, self._reward_attempts, told(cause))
        teacher = f"teacher {row.get(self.teacher_key)}" if len(self.teacher_client) > 1 else "the teacher"
        raise explained(TeacherError, f"{teacher} failed {self._reward_attempts} times, last with ", cause)

    def _check_reward(self, output: AgentLoopOutput, trained: Sequence[str]) -> None:
        if output.reward_score is None and not self.reward_loop_worker_handles:
            # The trainer computes the reward later.
            return
        report = output.extra_fields.get(REPORTED)
        check_report(report)
        check_reward(output.reward_score, report or {}, trained)
        output.reward_score = float(output.reward_score)

    def _metric_of(self, output: Any, metric: str) -> float:
        found = {**(output.extra_fields.get(REPORTED) or {}), REWARD_METRIC: output.reward_score}
        if found.get(metric) is None:
            raise RewardError(
                f"algorithm.filter_groups.metric={metric} is not among the values that the reward function returned "
                f"({', '.join(sorted(map(str, found)))}); return it there, or set the metric to one of these names"
            )
        check_reward(output.reward_score, found, [metric])
        return float(found[metric])

    def _scored(self, outputs: list[Any], recorder: TrajectoryRecorder) -> TrajectoryScored:
        metric = None if recorder.validates else self._filter_metric
        fields = [output.extra_fields for output in outputs]
        runs = [run for of_output in fields for run in of_output[VERSION_RUNS]]
        # Several outputs may contain the same sampled token, which must count only once.
        arrived = recorder.received_tokens + recorder.restored_tokens
        return TrajectoryScored(
            score=outputs[-1].reward_score,
            oldest_version=min(of_output["min_global_steps"] for of_output in fields),
            newest_version=max(of_output["max_global_steps"] for of_output in fields),
            exact_versions=all(of_output["exact_versions"] for of_output in fields),
            interruptions=recorder.interruptions,
            reprefilled_tokens=recorder.reprefilled_tokens,
            response_tokens=sum(count for _, count in runs),
            cut_tokens=recorder.cut_tokens,
            recovered_tokens=recorder.recovered_tokens,
            restored_tokens=recorder.restored_tokens,
            filter_metric=None if metric is None else self._metric_of(outputs[-1], metric),
            sampled_tokens=min(arrived, sum(count for version, count in runs if version != NOT_SAMPLED)),
            received_tokens=recorder.received_tokens,
            tool_s=recorder.tools.seconds,
            asked_s=recorder.asked_s,
        )


def _share_reward(outputs: list[AgentLoopOutput]) -> None:
    """Copy the last output's reward, and the values reported with it, to each output that has no reward."""
    last = outputs[-1]
    for output in outputs[:-1]:
        if output.reward_score is None:
            output.reward_score = last.reward_score
            if REPORTED in last.extra_fields:
                output.extra_fields[REPORTED] = last.extra_fields[REPORTED]


async def _cancel(task: asyncio.Task[Any], key: str) -> None:
    """Cancel the task of an agent loop, and abandon it if it does not end within `CANCELLED_S` seconds."""
    task.cancel()
    await asyncio.wait({task}, timeout=CANCELLED_S)
    if not task.done():
        logger.error("the agent loop of trajectory %s is still running after its cancellation, and is abandoned", key)
        # When the abandoned task ends, read its error. Otherwise asyncio would warn that the error was never read.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())


def group_of(key: str) -> int:
    """Return the id of the group in ``key``, the key of an attempt ("group-trajectory-attempt")."""
    return int(key.partition("-")[0])


def is_first_attempt(key: str) -> bool:
    """Return whether ``key`` ("group-trajectory-attempt") names a trajectory's first attempt."""
    return key.endswith("-0")


def filter_metric(config: Any) -> str | None:
    """Return the name of the metric by which groups are filtered, or None if groups are not filtered."""
    settings = OmegaConf.select(config, "algorithm.filter_groups")
    return str(settings.metric) if settings is not None and settings.get("enable") else None


def is_given(value: Any) -> bool:
    """Return whether a field of a data row has a value, which means neither None nor an empty string nor NaN."""
    return value is not None and value != "" and value == value


def vocabulary_of(model_config: Any) -> int:
    """Return the vocabulary size in the model's configuration, or 2**31 if the configuration lacks it."""
    config = getattr(model_config, "hf_config", None)
    config = getattr(config, "text_config", None) or config
    return getattr(config, "vocab_size", None) or INT32
