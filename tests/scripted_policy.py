# SPDX-License-Identifier: Apache-2.0
"""An agent loop whose policy is a script: a client in place of the engines', and a tokenizer with a chat template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from omegaconf import OmegaConf
from tokenizers import AddedToken
from transformers import Qwen2Tokenizer
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from recipe.agents.loop import OpenAIAgentLoop

# Of Qwen 2.5, without its default system prompt.
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
PROMPT, RESPONSE = 4096, 4096


@cache
def tokenizer() -> Qwen2Tokenizer:
    """Qwen's byte-level BPE without merges: a token for each byte, and the marks of turns and calls."""
    from tokenizers.pre_tokenizers import ByteLevel

    symbols = {symbol: number for number, symbol in enumerate((*SPECIAL, *sorted(ByteLevel.alphabet())))}
    made = Qwen2Tokenizer(
        vocab=symbols, merges=[], eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token=None, bos_token=None
    )
    made.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in SPECIAL], special_tokens=True)
    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    made.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    made.chat_template = TEMPLATE
    return made


def called(name: str, **arguments: Any) -> str:
    """A call of a tool as the policy writes it; the spaces are not those that a template would put."""
    return f'<tool_call>\n{{"name":"{name}","arguments": {json.dumps(arguments, indent=1)}}}\n</tool_call>'


class ScriptedClient:
    """Gives the texts of a script in turn, as an engine gives tokens: with an end, stop words and a limit."""

    def __init__(self, script: Sequence[str | Exception] | Callable[[str], str], seconds: float = 0.0) -> None:
        self.requests: list[dict[str, Any]] = []
        self.sampled: list[tuple[list[int], list[int], list[float]]] = []
        self.cancelled = 0
        self._script, self._seconds = script, seconds

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **more: Any
    ) -> TokenOutput:
        number = len(self.requests)
        text = tokenizer().decode(prompt_ids)
        self.requests.append({"text": text, "sampling": sampling_params, **more})
        try:
            await asyncio.sleep(self._seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        answer = self._script(text) if callable(self._script) else self._script[number]
        if isinstance(answer, Exception):
            raise answer
        ends = [answer.index(word) + len(word) for word in sampling_params.get("stop", ()) if word in answer]
        tokens = tokenizer().encode(answer[: min(ends, default=None)])
        tokens = (tokens if ends else [*tokens, tokenizer().eos_token_id])[: sampling_params["max_tokens"]]
        log_probs = [-0.001 * (1000 * number + place + 1) for place in range(len(tokens))]
        self.sampled.append((list(prompt_ids), tokens, log_probs))
        return TokenOutput(token_ids=tokens, log_probs=log_probs, stop_reason="completed")


def agent_loop(client: ScriptedClient, **arguments: Any) -> OpenAIAgentLoop:
    """An agent loop whose requests go to ``client``."""
    return made(OpenAIAgentLoop, client, **arguments)


def made(kind: Any, client: ScriptedClient, **arguments: Any) -> Any:
    """A loop made by verl's own constructor, whose requests go to ``client``."""
    limits = {"max_user_turns": None, "max_assistant_turns": None, "max_parallel_calls": 1}
    tools = {"format": "hermes", "max_tool_response_length": 256, "tool_response_truncate_side": "middle", **limits}
    lengths = {"prompt_length": PROMPT, "response_length": RESPONSE}
    rollout = {**lengths, "multi_turn": tools, "full_determinism": False}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    return kind(
        trainer_config=DictConfigWrap(config),
        server_manager=client,
        tokenizer=tokenizer(),
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
        hf_model_type="qwen2",
        **arguments,
    )


def check_trained(client: ScriptedClient, outputs: Any) -> None:
    """Each token that the script sampled is trained once, after the tokens that it was sampled after."""
    listed = outputs if isinstance(outputs, list) else [outputs]
    trained = {}
    for output in listed:
        sequence = output.prompt_ids + output.response_ids
        for place, mask in enumerate(output.response_mask):
            if mask:
                log_prob = output.response_logprobs[place]
                assert log_prob not in trained, "a token is trained twice"
                trained[log_prob] = sequence[: len(output.prompt_ids) + place + 1]
    sampled = {
        log_prob: [*prompt, *tokens[: place + 1]]
        for prompt, tokens, log_probs in client.sampled
        for place, log_prob in enumerate(log_probs)
    }
    assert trained == sampled
