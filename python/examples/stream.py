"""Text as it is made, whole characters at a time; the stream is dropped when there is enough.

python python/examples/stream.py [MODEL]
"""

from __future__ import annotations

import sys

from qwen_rs import LLM, SamplingParams

with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
    sentences = 0
    for piece in llm.stream("Emma Woodhouse, handsome, clever, and rich,", SamplingParams(seed=1)):
        print(piece.text, end="", flush=True)
        sentences += piece.text.count(".")
        if sentences == 2:
            break  # nothing to close: the sequence's cache goes with the stream
print()
