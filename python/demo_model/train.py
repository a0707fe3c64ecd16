"""Train the demo model that ships with qwen-rs: a small Qwen3 that writes like Jane Austen.

    pip install torch transformers tokenizers safetensors numpy
    python python/demo_model/train.py --corpus austen.txt --out python/qwen_rs/demo

The corpus is one paragraph a line, with novels separated by ``<|endoftext|>``.  Of every novel the
last 6% is kept from training: the first half of that chooses the checkpoint that is kept
(validation), the second half is measured once, at the end (test).  Two CPU cores need about an
hour.  Same corpus, seed, thread count and library versions give the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = [END_OF_TEXT, "<|im_start|>", "<|im_end|>"]
# Qwen's own pre-tokenizer pattern, so that the demo exercises what real checkpoints use.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def split_novels(text: str) -> tuple[list[str], list[str], list[str]]:
    """Each novel into training, validation and test text, cut at paragraphs."""
    train, validation, test = [], [], []
    for novel in filter(str.strip, text.split(END_OF_TEXT)):
        lines = novel.strip("\n").split("\n")
        if len(lines) < 100:
            raise SystemExit(f"a novel of {len(lines)} paragraphs: is this the right corpus?")
        cut_a, cut_b = int(len(lines) * 0.94), int(len(lines) * 0.97)
        train.append("\n".join(lines[:cut_a]) + "\n")
        validation.append("\n".join(lines[cut_a:cut_b]) + "\n")
        test.append("\n".join(lines[cut_b:]) + "\n")
    return train, validation, test


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = [i for text in texts for i in [*tokenizer.encode(text).ids, end]]
    return torch.from_numpy(np.array(ids, dtype=np.int64))


def add_dropout(model: Qwen3ForCausalLM, p: float) -> None:
    """Residual dropout while training; Qwen3 itself has none and inference sees none."""

    def hook(module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return F.dropout(output, p, training=module.training)

    model.model.embed_tokens.register_forward_hook(hook)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(hook)
        layer.mlp.down_proj.register_forward_hook(hook)


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, tokens: torch.Tensor, length: int) -> float:
    """Mean cross-entropy in nats per token, over non-overlapping windows."""
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(tokens) - 1, length):
        window = tokens[start : start + length + 1]
        if len(window) < 2:
            continue
        logits = model(input_ids=window[None, :-1]).logits[0].float()
        total += F.cross_entropy(logits, window[1:], reduction="sum").item()
        count += len(window) - 1
    model.train()
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=1813)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)

    train_texts, validation_texts, test_texts = split_novels(args.corpus.read_text(encoding="utf-8"))
    tokenizer = train_tokenizer(train_texts, vocab_size=4096)
    train, validation, test = (encode(tokenizer, t) for t in (train_texts, validation_texts, test_texts))
    bytes_per_token = sum(len(t.encode()) for t in test_texts) / len(test)
    counts = f"train {len(train)}, validation {len(validation)}, test {len(test)}"
    print(f"tokens: {counts}; {bytes_per_token:.2f} bytes each")

    end = tokenizer.token_to_id(END_OF_TEXT)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = Qwen3ForCausalLM(config)
    print(f"parameters: {sum(p.numel() for p in model.parameters()):,}")
    add_dropout(model, 0.15)

    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
        lr=2e-3,
        betas=(0.9, 0.95),
    )
    warmup, long_from = 100, int(args.steps * 0.88)

    def learning_rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (args.steps - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    generator = torch.Generator().manual_seed(args.seed)
    best_loss, best_state = math.inf, None
    model.train()
    started = time.monotonic()
    for step in range(args.steps):
        # The last steps see windows as long as the context, so that RoPE is trained to its end.
        rows, length = (8, 512) if step < long_from else (2, 2048)
        starts = torch.randint(len(train) - length - 1, (rows,), generator=generator).tolist()
        batch = torch.stack([train[s : s + length + 1] for s in starts])
        logits = model(input_ids=batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if (step + 1) % 100 == 0 or step + 1 == args.steps:
            validation_loss = held_out_loss(model, validation, 512)
            if validation_loss < best_loss:
                best_loss = validation_loss
                best_state = {k: v.detach().clone() for k, v in model.state_dict().items()}
            print(
                f"step {step + 1}: train {loss.item():.3f}, validation {validation_loss:.4f}, "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )

    assert best_state is not None
    model.load_state_dict(best_state)
    model.to(torch.bfloat16)  # what ships is what is measured
    test_loss = held_out_loss(model, test, 512)
    print(
        f"test loss {test_loss:.4f} nats a token, {test_loss / math.log(2) / bytes_per_token:.3f} bits a byte"
    )

    args.out.mkdir(parents=True, exist_ok=True)
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.8
    model.generation_config.top_p = 0.95
    model.generation_config.top_k = 50
    model.generation_config.eos_token_id = [end]
    model.save_pretrained(args.out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, model_max_length=2048
    ).save_pretrained(args.out)
    (args.out / "training.json").write_text(
        json.dumps(
            {
                "corpus": args.corpus.name,
                "steps": args.steps,
                "seed": args.seed,
                "validation_loss_nats_per_token": round(best_loss, 4),
                "test_loss_nats_per_token": round(test_loss, 4),
                "test_bits_per_byte": round(test_loss / math.log(2) / bytes_per_token, 4),
                "torch": torch.__version__,
            },
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
