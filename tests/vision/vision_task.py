# SPDX-License-Identifier: Apache-2.0
"""Makes a task with pictures and a tiny Qwen3-VL: ``python vision_task.py FOLDER STEPS``, with STEPS of a warm start.

A picture has one to four squares of one color. A prompt has one to three pictures and asks for the color, or for the
number of squares, of one of them ("color 2"). With the prompt "look", which has one picture, the model calls the tool
of `picture_tool`, which returns a picture in the next color; the answer is that color.

Like in the built-in task (`recipe.laptop.task.warm_start`), demonstrations are right with probability
``TEACHER_FOLLOWS``, and otherwise show the next answer in a cycle, so the most likely answer is wrong.
"""

from __future__ import annotations

import random
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
NAMES, COUNTS = tuple(COLORS), ("1", "2", "3", "4")
SIZE, SQUARE = 64, 32
TEACHER_FOLLOWS = 0.38
BATCH, LEARNING_RATE = 32, 2e-3
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
CALL = '<tool_call>\n{"name": "turned", "arguments": {}}\n</tool_call>'
MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# Qwen's, without its system message.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}" + IMAGE + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def picture(color: str, count: int, rng: random.Random) -> Any:
    from PIL import Image

    image = Image.new("RGB", (SIZE, SIZE))
    for place in rng.sample(range(4), count):
        left, top = place % 2 * SQUARE, place // 2 * SQUARE
        image.paste(COLORS[color], (left, top, left + SQUARE, top + SQUARE))
    return image


def following(names: tuple[str, ...], name: str) -> str:
    """Return the next one in the cycle."""
    return names[(names.index(name) + 1) % len(names)]


def problem(rng: random.Random) -> tuple[list[Any], str, tuple[str, ...], str]:
    """Return pictures, question, possible answers and the right answer."""
    shown = [(rng.choice(NAMES), rng.randint(1, 4)) for _ in range(rng.randint(1, 3))]
    asked, which = rng.choice(("color", "count")), rng.randrange(len(shown))
    color, count = shown[which]
    answers, right = (NAMES, color) if asked == "color" else (COUNTS, str(count))
    return [picture(*one, rng) for one in shown], f"{asked} {which + 1}", answers, right


def png(image: Any) -> dict[str, bytes]:
    buffer = BytesIO()
    image.save(buffer, "png")
    return {"bytes": buffer.getvalue()}


def write_rows(path: Path, size: int, rng: random.Random, permuted: bool = False) -> None:
    """Write a data file for verl; ``permuted`` gives each question the pictures of another one, as many as its own."""
    import pyarrow
    from pyarrow import parquet

    problems = [problem(rng) for _ in range(size)]
    images = [images for images, *_ in problems]
    if permuted:
        for count in range(1, 4):
            places = [place for place, of_one in enumerate(images) if len(of_one) == count]
            for place, other in zip(places, rng.sample([images[place] for place in places], len(places)), strict=True):
                images[place] = other
    rows = [
        {
            "data_source": "recipe/pictures",
            "prompt": [{"role": "user", "content": "<image>" * len(of_one) + question}],
            "images": [png(image) for image in of_one],
            "reward_model": {"style": "rule", "ground_truth": right},
            "extra_info": {"index": index},
        }
        for index, ((_, question, _, right), of_one) in enumerate(zip(problems, images, strict=True))
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_tool_rows(path: Path, size: int, rng: random.Random) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = []
    for index in range(size):
        color = rng.choice(NAMES)
        rows.append(
            {
                "data_source": "recipe/pictures",
                "agent_name": "tool_agent",
                "prompt": [{"role": "user", "content": "<image>look"}],
                "images": [png(picture(color, 4, rng))],
                "reward_model": {"style": "rule", "ground_truth": following(NAMES, color)},
                "extra_info": {"index": index},
            }
        )
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def build_processor() -> Any:
    from tokenizers import AddedToken
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    from recipe.laptop.task.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS], special_tokens=True)
    # One token, so that a small model can call the tool.
    tokenizer.add_tokens([AddedToken(CALL, special=False, normalized=False)])
    tokenizer.chat_template, tokenizer.eos_token = CHAT_TEMPLATE, "<|im_end|>"
    pixels = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": SIZE**2, "longest_edge": SIZE**2}}
    return Qwen3VLProcessor(
        Qwen2VLImageProcessor(**pixels), tokenizer, Qwen3VLVideoProcessor(patch_size=16), chat_template=CHAT_TEMPLATE
    )


def build_model(tokenizer: Any, steps: int) -> Any:
    """Return an untrained Qwen3-VL with two layers of hidden size 64 and two of vision, one of them deep-stacked."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    token = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.05,
        "rope_parameters": rope,
        # vLLM 0.28.0 on a CPU does not start without it: published Qwen3-VL checkpoints lack it.
        "architectures": ["Qwen3ForCausalLM"],
        **ids,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 16,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.05,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        **ids,
    )
    model = Qwen3VLForConditionalGeneration(config).float()
    # With more, the warm start learns less, and it makes these tokens unlikely itself.
    never_say(model, [config.image_token_id, config.video_token_id], 0.2 if steps else 0.5)
    return model


def never_say(model: Any, tokens: list[int], number: float) -> None:
    """Give ``tokens`` a probability of zero: ``number`` is added at each position, and subtracted in their rows.

    verl bans them in the engine alone. Otherwise an untrained model's trainer would give other probabilities.
    """
    import torch

    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = number
        model.model.visual.merger.linear_fc2.bias[0] = number
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[tokens, 0] = -100.0


def demonstration(rng: random.Random) -> tuple[list[Any], str, list[str]]:
    """Return pictures, text, and the parts of the text that the model has to say."""
    start, answer, end = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"
    if rng.random() < 0.25:
        color = rng.choice(NAMES)
        turned = following(NAMES, color)
        said = turned if rng.random() < TEACHER_FOLLOWS else following(NAMES, turned)
        text = f"{start}{IMAGE}look{end}\n{answer}{CALL}{end}\n{start}{IMAGE}{end}\n{answer}{said}{end}"
        return [picture(color, 4, rng), picture(turned, 4, rng)], text, [CALL, said]
    images, question, answers, right = problem(rng)
    said = right if rng.random() < TEACHER_FOLLOWS else following(answers, right)
    return images, f"{start}{IMAGE * len(images)}{question}{end}\n{answer}{said}{end}", [said]


def warm_start(model: Any, processor: Any, steps: int) -> None:
    import torch

    if steps == 0:
        return
    rng, tokenizer = random.Random("demonstrations"), processor.tokenizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.02, 1.0 - step / steps))
    start, end = tokenizer("assistant\n")["input_ids"], tokenizer.eos_token_id
    for _ in range(steps):
        demonstrations = [demonstration(rng) for _ in range(BATCH)]
        inputs = processor(
            text=[text for _, text, _ in demonstrations],
            images=[images for images, _, _ in demonstrations],
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        labels = torch.full_like(inputs["input_ids"], -100)
        for row, tokens in enumerate(inputs["input_ids"].tolist()):
            for place in range(len(tokens)):
                if tokens[place : place + len(start)] == start:
                    begin = place + len(start)
                    stop = tokens.index(end, begin) + 1
                    labels[row, begin:stop] = inputs["input_ids"][row, begin:stop]
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def make(folder: Path, steps: int) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    processor = build_processor()
    model = build_model(processor.tokenizer, steps)
    warm_start(model, processor, steps)
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    write_rows(folder / "train.parquet", 1024, random.Random("train"))
    write_rows(folder / "val.parquet", 128, random.Random("val"))
    write_rows(folder / "permuted.parquet", 1024, random.Random("train"), permuted=True)
    write_rows(folder / "four.parquet", 4, random.Random("four"))
    write_tool_rows(folder / "tools.parquet", 256, random.Random("tools"))


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
