"""A conversation of two turns through the checkpoint's chat template.

    python python/examples/chat.py Qwen/Qwen3-0.6B

The bundled demo has no chat template; any checkpoint directory or hub id that has one will do.
"""

from __future__ import annotations

import sys

from qwen_rs import LLM, Message, SamplingParams

if len(sys.argv) != 2:
    sys.exit(f"usage: {sys.argv[0]} MODEL")

with LLM(sys.argv[1]) as llm:
    messages: list[Message] = [{"role": "system", "content": "Answer in one sentence."}]
    for question in ("Why is the sky blue?", "And at sunset?"):
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, SamplingParams(max_tokens=60), enable_thinking=False)
        messages.append({"role": "assistant", "content": answer.content})
        print(f"> {question}\n{answer.content}")
