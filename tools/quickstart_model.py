"""The quickstart's tokenizer and its untrained base model: Qwen3's, but small."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MAX_VOCAB = 448
MAX_POSITIONS = 1024

# Qwen's own split: every digit is a token of its own, newlines never join with digits.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
TURN_WORDS = "system\nuser\nassistant\n\n\n"  # so that the template's own words become single tokens


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE in Qwen's manner, at most `MAX_VOCAB` tokens, with Qwen's special tokens and a chat template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, TURN_START, TURN_END]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB - 2, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens(["<think>", "</think>"])  # not "special": they stay in decoded text, as with Qwen3
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=TURN_END, pad_token=END_OF_TEXT, model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def base_config(tokenizer: PreTrainedTokenizerFast, hidden_size: int = 96, num_layers: int = 4) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64, hidden_size=hidden_size,
        intermediate_size=-(-hidden_size * 8 // 96) * 32, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=MAX_POSITIONS,
        rope_theta=10_000.0, tie_word_embeddings=False, dtype="float32", bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip


def write_base_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int, **size: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(base_config(tokenizer, **size))
    # transformers starts the pad token's row at zero. A norm divides by its length: where the token is read (a critic's
    # separator, or sampled), its gradient would be thousands of times all others and clip them away.
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer.pad_token_id].normal_(std=model.config.initializer_range)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
