"""Tokenize text into files for training: any text, any tokenizer, all cores; by default Python's standard library.

    uv run scripts/tokenize_data.py                                        # the standard library: data/stdlib-bpe4096
    uv run scripts/tokenize_data.py --input books/ --suffix .txt --vocab-size 16384
    uv run scripts/tokenize_data.py --input web.jsonl --field content --tokenizer Qwen2.5-0.5B/
    uv run scripts/tokenize_data.py --input TinyStories-train.txt --separator '<|endoftext|>'
    uv run scripts/tokenize_data.py --chat --input chats.jsonl --tokenizer Qwen2.5-0.5B-Instruct/

The hash of its text decides whether a document is held out for evaluation; of a single document the last part is. The
folder appears only when it is complete.
"""

import json
import time

from cs336_systems.pretraining.tokenizing import TokenizeOptions, tokenize
from cs336_systems.report.command_line import cli, complain, exit_with

NAME = "tokenize_data"


def main(arguments: list[str] | None = None) -> int:
    """Parse, tokenize, say what came of it; returns the exit code."""
    options = cli(TokenizeOptions, arguments, __doc__)
    started = time.perf_counter()
    try:
        dataset = tokenize(options)
    except (ValueError, OSError) as error:
        return complain(NAME, error)
    seconds = time.perf_counter() - started

    import pandas as pd

    from cs336_systems.report.tables import Table, show

    splits = dataset.manifest["splits"]
    totals = {count: sum(split[count] for split in splits.values()) for count in ("documents", "bytes", "tokens")}
    lines = [
        {"split": name}
        | {count: f"{split[count]:,}" for count in totals}
        | {"bytes per token": f"{split['bytes'] / split['tokens']:.2f}", "token files": str(len(split["files"]))}
        for name, split in splits.items()
    ]
    n_files = dataset.manifest["files"]
    files = f"{n_files:,} file{'s' if n_files > 1 else ''}"
    caption = f"{dataset.manifest['corpus']}: {files}, vocabulary {dataset.vocab_size:,}"
    show(Table(caption, pd.DataFrame(lines)), "auto")
    print(f"{dataset.folder}, in {seconds:.1f} s ({totals['bytes'] / seconds / 1e6:.1f} MB/s)")
    line = {"command": NAME, "out": str(dataset.folder), "vocab_size": dataset.vocab_size} | totals
    line |= {f"{name}_tokens": split["tokens"] for name, split in splits.items()}
    print(json.dumps(line | {"bytes_per_token": round(totals["bytes"] / totals["tokens"], 3), "s": round(seconds, 2)}))
    return 0


if __name__ == "__main__":
    exit_with(NAME, main, left="nothing was written")
