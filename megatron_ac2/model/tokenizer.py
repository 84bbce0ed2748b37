"""A folder's tokenizer, its chat template and the tokens that end a response: what is wrong with them, by file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_ac2.data.json_text import read_object, reason, shown
from megatron_ac2.data.problems import template_prompts
from megatron_ac2.types import UserError

_JSON_FILES = ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json")
_TEMPLATE_FILE = "chat_template.jinja"
_QUESTIONS = ("What is 17 + 5?", "Name the largest planet.")
_REPLY = "Let me see."


def read_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Raises `UserError` that names the file to blame. Code that the folder brings along is never run."""
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the tokenizers library is no `Exception`
        raise UserError(_blame(Path(path), error)) from error


def load_tokenizer(path: str | Path, dialogue: bool = False) -> PreTrainedTokenizerBase:
    """A chat model's: it ends its turns, and its template shows what it is asked. Raises `UserError` otherwise.

    `dialogue`: also what it is asked behind a response, as a generative critic is.
    """
    tokenizer = read_tokenizer(path)
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        raise UserError(f"model.path: the tokenizer in {path} has no end-of-sequence token")
    if not tokenizer.chat_template:  # so does transformers' empty stand-in for tokenizer files that are not there
        raise UserError(f"model.path: the tokenizer in {path} is missing or has no chat template")
    problems = _template_problems(tokenizer, Path(path))
    if problems or (dialogue and (problems := _dialogue_problems(tokenizer, Path(path)))):
        raise UserError(problems)
    return tokenizer


def stop_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokenizer's end of sequence and those of generation_config.json: chat models often end on either of two.

    Raises `UserError` for what is no token of the tokenizer.
    """
    file = Path(path) / "generation_config.json"
    found = read_object(file).get("eos_token_id") if file.is_file() else None
    more: Sequence[Any] = found if isinstance(found, list) else [] if found is None else [found]
    largest = largest_id(tokenizer)
    if not all(type(token) is int and 0 <= token <= largest for token in more):
        raise UserError(f"{file}: eos_token_id: found {shown(found)}; accepted: one or a list of ids, 0 to {largest}")
    return sorted({int(tokenizer.eos_token_id), *more})


def largest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(tokenizer.get_vocab().values(), default=-1)


def vocabulary_problems(path: str | Path, vocab_size: int, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Each token needs a row of the model's embedding."""
    largest = largest_id(tokenizer)
    if largest < vocab_size:
        return []
    found = f"vocab_size: found {vocab_size}, but the tokenizer's ids go up to {largest}"
    return [f"{Path(path) / 'config.json'}: {found}; accepted: {largest + 1} or more"]


def _template_problems(tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[str]:
    """Two questions, and what the model would read of them."""
    where = f"{_template_file(folder)}: chat template"
    options = {"add_generation_prompt": True, "tokenize": False}
    try:
        texts = [tokenizer.apply_chat_template([{"role": "user", "content": q}], **options) for q in _QUESTIONS]
        ids = template_prompts(_QUESTIONS, tokenizer)
    except Exception as error:
        found = f"{type(error).__name__}: {reason(error)}"
        return [f"{where}: fails on a question: {found}; accepted: one that renders a user's turn"]
    lost = [question for question, text in zip(_QUESTIONS, texts, strict=True) if question not in text]
    if lost:
        return [f"{where}: leaves the question {lost[0]!r} out of the prompt; accepted: one that shows it as it is"]
    if not all(map(len, ids)) or ids[0] == ids[1]:
        file = folder / "tokenizer.json"
        return [f"{file}: found equal token ids for two questions; accepted: a tokenizer that tells texts apart"]
    return []


def _dialogue_problems(tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[str]:
    """Of a template that a generative critic writes its questions with: behind the response that they are about."""
    where, (first, second) = f"{_template_file(folder)}: chat template", _QUESTIONS
    turns = [("user", first), ("assistant", _REPLY), ("user", second)]
    chat = [{"role": role, "content": text} for role, text in turns]
    try:
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    except Exception as error:
        return [f"{where}: fails on user, assistant, user: {type(error).__name__}: {reason(error)}"]
    if -1 < text.find(_REPLY) < text.find(second):
        return []
    return [f"{where}: leaves turns out; accepted: one that a dialogue is read from"]


def _template_file(folder: Path) -> Path:
    return folder / (_TEMPLATE_FILE if (folder / _TEMPLATE_FILE).is_file() else "tokenizer_config.json")


def _blame(folder: Path, error: BaseException) -> list[str]:
    """The files that hold no JSON object, or else that of which the library itself makes no tokenizer."""
    files = [folder / name for name in _JSON_FILES if (folder / name).is_file()]
    problems = [problem for file in files for problem in _file_problems(file)]
    if problems:
        return problems
    file = folder / "tokenizer.json"
    try:
        Tokenizer.from_file(str(file))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as broken:
        if file.is_file():
            return [f"{file}: no readable tokenizer: {reason(broken)}"]
    found = f"{type(error).__name__}: {reason(error)}"
    if (folder / "tokenizer_config.json").is_file():
        return [f"{folder / 'tokenizer_config.json'}: no readable tokenizer: {found}"]
    return [f"model.path: no readable tokenizer in {folder}: {found}"]


def _file_problems(file: Path) -> list[str]:
    try:
        read_object(file)
    except UserError as error:
        return error.problems
    return []
