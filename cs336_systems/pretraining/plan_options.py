"""The options of ``--print-plan`` besides those of the run: the card, how many, the host's memory, and prices.

    asked, others = Asked.taken_from(["--print-plan", "--gpu", "h100", "--size", "tiny"])

Imports no torch.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from cs336_systems.declared import flag, sign_refusal

PRINT_PLAN = "--print-plan"


@dataclass(frozen=True)
class Asked:
    """The options of a plan, besides those of the run.

    Raises:
        ValueError: a number is not positive, or the price is below zero.
    """

    gpu: str = ""
    """A card's name, or its figures (``hardware_named``)."""
    gpus: int = 1
    host_gib: float | None = None
    """GiB of host memory for all ranks together."""
    price_per_gpu_hour: float | None = None
    run_tokens: float | None = None
    """Tokens of the whole run."""
    picture: str | None = None
    """The PNG to draw."""

    def __post_init__(self) -> None:
        signs = dict.fromkeys(("gpus", "host_gib", "run_tokens"), "positive") | {"price_per_gpu_hour": "not negative"}
        for name, sign in signs.items():
            if refusal := sign_refusal(name, getattr(self, name), sign):
                raise ValueError(refusal)

    @classmethod
    def taken_from(cls, arguments: Sequence[str]) -> "tuple[Asked, list[str]]":
        """Return the options of a plan, and the other arguments, for a run on a GPU.

        Raises:
            ValueError: a value is no number, or is missing.
        """
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        kinds: dict[str, Callable[[str], Any]] = {"gpu": str, "picture": str, "gpus": int, "run_tokens": _tokens}
        for each in fields(cls):
            kind = kinds.get(each.name, _number)
            parser.add_argument(flag(each.name), type=kind)
        of_run = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        of_run.add_argument("--device")
        of_run.add_argument("--device-gib", "--device_gib", type=_number)
        try:
            known, rest = parser.parse_known_args([each for each in arguments if each != PRINT_PLAN])
            run, _ = of_run.parse_known_args(rest)
        except (argparse.ArgumentError, argparse.ArgumentTypeError) as error:
            raise ValueError(str(error).replace("argument ", "", 1)) from None
        rest = rest if run.device else [*rest, "--device", "cuda"]
        if run.device_gib is not None and known.host_gib is not None:  # the run has both limits or none
            rest = [*rest, "--host-gib", str(known.host_gib)]
        return cls(**{name: value for name, value in vars(known).items() if value is not None}), rest


def _number(text: str) -> float | None:
    """Read a number, or None, as a file of --print-config says."""
    try:
        return None if text == "None" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"say a number, got {text!r}") from None


def _tokens(text: str) -> float:
    """Read 100B, 15T or a number."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:])
    try:
        return float(text[:-1]) * scale if scale else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"say a number of tokens, such as 100B or 15T, got {text!r}") from None
