"""Generate text with a trained model.

    uv run scripts/sample.py runs/stdlib --prompt "def main("            # the newest checkpoint
    uv run scripts/sample.py runs/stdlib/step-00000200 --temperature 0
    uv run scripts/sample.py runs/chat --chat                            # a conversation, a line each; Ctrl-D ends it
    uv run scripts/sample.py Qwen2.5-0.5B/ --prompt-file question.txt --top-p 0.95 --seed 1

The text is printed as it is generated, with a key/value cache, on a CPU or a GPU. The last line is one JSON
object.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs336_systems.report.command_line import ModelOptions, complain, exit_with, parse

NAME = "sample"


@dataclass(frozen=True)
class SampleOptions(ModelOptions):
    """Text from a trained model."""

    prompt: str = ""
    """Text to continue; without one the model begins a document."""
    prompt_file: Path | None = None
    """File with the text to continue."""
    chat: bool = False
    """Answer each line of the standard input, or the prompt alone, by the model's chat template."""
    max_tokens: int = 200
    """Largest number of new tokens; a text also ends with its document, or when the context is full."""
    temperature: float = 0.8
    """0 always takes the most likely token."""
    top_p: float | None = None
    """Draw from the fewest most likely tokens that together have this probability."""
    seed: int = 0
    """Seed of the draws."""


def main(arguments: list[str] | None = None) -> int:
    """Parse, sample, print; returns the exit code."""
    options = parse(SampleOptions, arguments, __doc__)
    try:
        return _sample(options)
    except (ValueError, OSError) as error:
        return complain(NAME, error)
    except RuntimeError as error:
        import torch

        if not isinstance(error, torch.OutOfMemoryError):
            raise
        return complain(NAME, f"the model and its cache do not fit into the GPU's memory: {str(error).splitlines()[0]}")


def _sample(options: SampleOptions) -> int:
    text = options.prompt
    if text and options.prompt_file is not None:
        raise ValueError("--prompt and --prompt-file exclude each other")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed must lie in 0..2^63 - 1, got {options.seed}")
    if options.prompt_file is not None:
        try:  # as bytes, so that the ends of lines stay as they are
            text = options.prompt_file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompt-file {options.prompt_file} is no UTF-8 text: {error}") from None
    options.check_device()
    trained = options.load(NAME, options.model)
    tokenizer = trained.tokenizer
    drawn = {name: getattr(options, name) for name in ("temperature", "top_p", "max_tokens", "seed")}
    text = text.encode(errors="replace").decode()  # a shell can pass what is no text
    if options.chat:
        return _chat(options, trained, [text] if text else _lines(), drawn)
    prompt = tokenizer.encode([text])[0][:-1].tolist() or [tokenizer.eos_id]
    ids, seconds = _generated(trained, prompt, trained.eos_ids, drawn, before=text)
    stopped = "end of text" if ids[-1] in trained.eos_ids else "max tokens"
    if stopped == "max tokens" and len(ids) < options.max_tokens:
        stopped = "context full"
    line: dict[str, Any] = {"command": NAME, "model": str(options.model), "step": trained.step, "stopped": stopped}
    line |= {"prompt_tokens": len(prompt), "new_tokens": len(ids), "tokens_per_s": round(len(ids) / seconds, 1)}
    print(json.dumps(line | {"text": tokenizer.decode([i for i in ids if i not in trained.eos_ids])}))
    return 0


def _generated(
    trained: Any, prompt: list[int], stops: frozenset[int], drawn: dict[str, Any], before: str = ""
) -> tuple[list[int], float]:
    """Print what follows a prompt as it comes, behind ``before``; returns its ids and the seconds."""
    from cs336_systems.pretraining.sampling import generate
    from cs336_systems.pretraining.tokenizer import TextStream

    started, ids, stream = time.perf_counter(), list[int](), TextStream(trained.tokenizer)
    for token_id in generate(trained.model, prompt, **drawn, eos_ids=stops, n_ids=trained.tokenizer.vocab_size):
        if not ids:
            print(before, end="", flush=True)
        ids.append(token_id)
        if token_id not in stops:
            print(stream.push(token_id), end="", flush=True)
    print(stream.rest())
    if ids[-1] not in stops and len(ids) < drawn["max_tokens"]:
        note = f"tokens is full after {len(prompt):,} of the prompt and {len(ids):,} new ones (the last takes none)"
        print(f"{NAME}: the context of {trained.model.config.context_length:,} {note}", file=sys.stderr)
    return ids, time.perf_counter() - started


def _lines() -> Iterator[str]:
    """The lines of the standard input that are not blank."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line.encode(errors="replace").decode()


def _chat(options: SampleOptions, trained: Any, turns: Iterable[str], drawn: dict[str, Any]) -> int:
    from cs336_systems.pretraining.chat import ChatEncoder, ChatTemplate
    from cs336_systems.pretraining.tokenizer import TOKENIZER

    tokenizer, path = trained.tokenizer, options.model.resolve()
    folder = path if (path / TOKENIZER).exists() else path.parent
    template = ChatTemplate.find(folder, eos=tokenizer.eos_token, advice="; a run has that of data made with --chat")
    encoder, context, n_new, seconds = ChatEncoder(tokenizer.json()), trained.model.config.context_length, 0, 0.0
    stops = trained.eos_ids | template.stops(encoder, tokenizer.eos_id)
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        ((prompt, _),) = encoder.encode([template.render(messages, answer_next=True)], [()])
        if len(messages) > 1 and len(prompt) > context:
            messages.pop()
            print(f"{NAME}: the conversation ends, as the context of {context:,} tokens is full", file=sys.stderr)
            break
        ids, took = _generated(trained, prompt.tolist(), stops, drawn)
        n_new, seconds = n_new + len(ids), seconds + took
        print(f"{NAME}: {len(ids):,} tokens, {len(ids) / took:,.1f} tokens/s", file=sys.stderr)
        answer = tokenizer.decode([token_id for token_id in ids if token_id not in stops])
        messages.append({"role": "assistant", "content": answer})
    line: dict[str, Any] = {"command": NAME, "model": str(options.model), "step": trained.step, "new_tokens": n_new}
    print(json.dumps(line | {"tokens_per_s": round(n_new / max(seconds, 1e-9), 1), "messages": messages}))
    return 0


if __name__ == "__main__":
    exit_with(NAME, main, left="the text ends here")
