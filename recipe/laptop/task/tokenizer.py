# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of the built-in task: Qwen's byte-level BPE with a vocabulary of printable ASCII.

The tokenizer has Qwen's class, because transformers loads every checkpoint of ``model_type`` qwen2 with that class,
whatever the checkpoint's ``tokenizer_class`` says. The vocabulary has a token for each character, for each prefix of an
instruction word, and for each role. Encoding and decoding reproduce printable ASCII and line breaks exactly, and drop
other characters.

The token for the end of a turn is also the end-of-sequence token, as in Qwen's chat models. Role markers are not
special tokens, so decoding keeps them, and an answer that contains one does not count as right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipe.laptop.task.problems import LONG_OPERATION, SHORT_OPERATIONS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END, BOS = "<|pad|>", "<|end|>", "<|begin|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
WORDS = (*SHORT_OPERATIONS, LONG_OPERATION)
# Byte-level BPE represents a space by the code point U+0120, and a line break by U+010A.
BYTE_SYMBOLS = {" ": "\u0120", "\n": "\u010a"}

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 115 tokens with a chat template and pad, end and begin tokens."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    characters = [BYTE_SYMBOLS.get(character, character) for character in ("\n", *map(chr, range(32, 127)))]
    merges = [(word[:end], word[end]) for word in WORDS for end in range(1, len(word))]
    merged = [left + right for left, right in merges]
    vocabulary = {token: index for index, token in enumerate((PAD, END, BOS, *ROLES, *characters, *merged))}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        pad_token=PAD,
        eos_token=END,
        bos_token=BOS,
        unk_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=512,
    )
    tokenizer.add_tokens([AddedToken(role, special=False, normalized=False) for role in ROLES])
    return tokenizer
