"""Conversations as text, by a tokenizer's own chat template, with the characters and tokens that are answers.

    template = ChatTemplate.find(Path("Qwen2.5-0.5B-Instruct"))
    messages = messages_of({"prompt": "2 + 2?", "completion": "4"}, "line 1", Counter())
    text, answers = template.conversation(messages)             # answers: (first, last + 1) characters of each
    ((ids, is_answer),) = ChatEncoder(tokenizer.json()).encode([text], [answers])

Templates are Jinja, run in its sandbox with the tags, filters and functions that transformers provides, so text and
tokens equal those of ``apply_chat_template``. As there, message text that spells a special token becomes that token.

If a template marks answers by ``{% generation %}``, the marks are used. Otherwise an answer begins where the template's
generation prompt ends, and ends with the end of its turn, without trailing white space. Tools are not rendered:
messages of tools and answers that only call one are left out and counted.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
import numpy as np
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray
from tokenizers import Tokenizer as Definition

from cs336_systems.config import how_to_download
from cs336_systems.pretraining.tokenizer import END_OF_TEXT

TEMPLATE = "chat_template.jinja"
ROLES = ("system", "developer", "user", "assistant")
TOOL_MESSAGES, WITHOUT_ANSWER = "messages of tools left out", "conversations without an answer left out"
TOOL_LISTS, TOOL_CALLS = "lists of tools left out", "calls of tools beside an answer left out"
HALF_PAIRS = "rows with halves of surrogate pairs, which became ?"
"""Keys of the counts that are made while conversations are read."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning in data sets. Templates get it under the first two, as from transformers."""
_BEGIN, _END, _PROBE = "\ue0f0\ue0f1", "\ue0f1\ue0f0", "\ue0f2probe\ue0f2"
"""Marks around answers and a placeholder for an answer, of private characters that no template contains."""

Answers = tuple[tuple[int, int], ...]
"""(First, last + 1) character of each answer of a text."""


class _Generation(Extension):
    """The tags ``{% generation %}`` .. ``{% endgeneration %}`` around an answer."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


class ChatTemplate:
    """A chat template.

    Args:
        source: the template's Jinja text.
        special_tokens: values of the template's variables bos_token, eos_token and so on.

    Raises:
        ValueError: the source is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda how: datetime.now().strftime(how)
        self.source, self._special_tokens = source, dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not Jinja: {error}") from None

    @classmethod
    def find(
        cls, tokenizer: Path | None, file: Path | None = None, eos: str | None = None, *, advice: str = ""
    ) -> Self:
        """Return the template of a tokenizer's folder, or of a file; the tokenizer's config names special tokens.

        Args:
            tokenizer: a ``tokenizer.json`` or its folder; None for a tokenizer trained by this package.
            eos: the end-of-text token, which overrides the config's.
            advice: is appended to the error message if there is no template.

        Raises:
            ValueError: there is no template or tokenizer, or one is damaged.
            OSError: a file cannot be read.
        """
        if tokenizer is not None and not tokenizer.exists():
            raise ValueError(f"tokenizer {tokenizer} does not exist{how_to_download(tokenizer)}")
        folder = None if tokenizer is None else tokenizer if tokenizer.is_dir() else tokenizer.parent
        settings: dict[str, Any] = {}
        if folder is not None and (config := folder / "tokenizer_config.json").exists():
            try:
                settings = dict(json.loads(config.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{config} is no object of JSON: {error}") from None
        named = {name: one["content"] if isinstance(one, dict) else one for name, one in settings.items()
                 if name.endswith("_token") and isinstance(one, str | dict)}  # fmt: skip
        named |= {"eos_token": eos} if eos else {} if folder is not None else {"eos_token": END_OF_TEXT}
        if file is None and folder is not None and (folder / TEMPLATE).exists():
            file = folder / TEMPLATE
        if file is not None:
            try:
                return cls(file.read_text(encoding="utf-8"), named)
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from None
        source = settings.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {each["name"]: each["template"] for each in source}.get("default")
        if source is None:
            where = f"{folder} has no {TEMPLATE}, and its config none" if folder else "a tokenizer made here has none"
            raise ValueError(f"no chat template: {where}{advice}")
        return cls(source, named)

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer_next: bool = False) -> str:
        """Return the text of a conversation, with the generation prompt if ``answer_next``.

        Raises:
            ValueError: the template rejects the conversation, for example because roles do not alternate.
        """
        return self._rendered(messages, answer_next).replace(_BEGIN, "").replace(_END, "")

    def _rendered(self, messages: Sequence[Mapping[str, Any]], answer_next: bool) -> str:
        shared = {"tools": None, "documents": None, "add_generation_prompt": answer_next}
        try:
            return self._template.render(messages=list(messages), **(self._special_tokens | shared))
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from None
        except Exception as error:  # a template is a program: it may divide by zero or recurse endlessly
            raise ValueError(f"the chat template fails on the conversation: {error}") from None

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, Answers]:
        """Return a conversation's text and its answers' spans; raises ValueError as ``render``, or if spans are
        ambiguous."""
        marked = self._rendered(messages, False)
        text = marked.replace(_BEGIN, "").replace(_END, "")
        if _BEGIN in marked:
            return text, tuple(_marked(marked))
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return text, tuple(self._answer(messages, i, text) for i in answers)

    def stops(self, encoder: "ChatEncoder", eos_id: int) -> frozenset[int]:
        """Return the id of the token that ends an answer: end of turn or end of text; empty if there is neither."""
        messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _PROBE}]
        end_of_turn = self.render(messages).partition(_PROBE)[2].rstrip()
        ((ids, _),) = encoder.encode([end_of_turn], [()])
        return frozenset(ids.tolist() if len(ids) == 1 else {eos_id} & set(ids.tolist()))

    def _answer(self, messages: Sequence[Mapping[str, Any]], i: int, text: str) -> tuple[int, int]:
        before = self.render(messages[:i], answer_next=True)
        probe = {"role": "assistant", "content": _PROBE}
        _, found, end_of_turn = self.render([*messages[:i], probe]).partition(_PROBE)
        if not found:
            raise ValueError(f"the chat template leaves answer {i + 1} out or writes it in another way")
        _, _, rest = self.render([*messages[:i], probe, *messages[i + 1 :]]).partition(_PROBE)
        if not (text.startswith(before) and text.endswith(rest) and rest.startswith(end_of_turn)):
            fault = f"the chat template writes what is around answer {i + 1} in several ways"
            raise ValueError(f"{fault}, so it must mark answers by {{% generation %}}")
        # White space after the end of a turn is never generated: generation stops at the end of the turn.
        kept = end_of_turn.rstrip()
        return len(before), len(text) - len(rest) + len(kept)


def _marked(text: str) -> Iterator[tuple[int, int]]:
    """Yield the (first, last + 1) characters between marks, in the text without marks."""
    before, *parts = text.split(_BEGIN)
    done = len(before)
    for part in parts:
        inside, _, outside = part.partition(_END)
        yield done, done + len(inside)
        done += len(inside) + len(outside)


def messages_of(row: Mapping[str, Any], place: str, counted: Counter[str]) -> list[dict[str, Any]]:
    """Return the messages of a JSON line: ``messages``, or ``prompt`` and ``completion``, each text or messages.

    Args:
        counted: is incremented for everything left out.

    Raises:
        ValueError: there are no such fields, a message lacks role or content, or its role is unknown.
    """
    if "messages" in row:
        found = row["messages"]
    elif "prompt" in row and "completion" in row:
        found = [*_as_messages(row["prompt"], "user"), *_as_messages(row["completion"], "assistant")]
    else:
        raise ValueError(f"{place}: neither messages nor prompt and completion, it has {', '.join(row) or 'nothing'}")
    if not isinstance(found, list):
        raise ValueError(f"{place}: messages must be a list, got {type(found).__name__}")
    counted[TOOL_LISTS] += bool(row.get("tools"))
    messages, is_changed = [], False
    for number, message in enumerate(found, 1):
        where = f"{place}, message {number}"
        if not isinstance(message, dict):
            raise ValueError(f"{where}: a message has role and content, got {type(message).__name__}")
        role, content = message.get("role"), message.get("content")
        calls = bool(message.get("tool_calls") or message.get("function_call"))
        if role in ("tool", "function") or (calls and not content):
            counted[TOOL_MESSAGES] += 1
            continue
        if role not in ROLES:
            raise ValueError(f"{where}: unknown role {role!r}: known are {', '.join(ROLES)} and tool")
        if not isinstance(content, str):
            found_there = "no content" if content is None else f"content of type {type(content).__name__}"
            raise ValueError(f"{where}: {found_there}, where text must be")
        counted[TOOL_CALLS] += calls
        own = {"role": role, "content": _text(content)}
        if reasoning := next((message[name] for name in _REASONING if isinstance(message.get(name), str)), None):
            own |= {"reasoning_content": _text(reasoning), "thinking": _text(reasoning)}
        is_changed |= own["content"] != content or own.get("thinking") != (reasoning or None)
        messages.append(own)
    counted[HALF_PAIRS] += is_changed
    return messages


def _as_messages(value: Any, role: str) -> list[Any]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _text(value: str) -> str:
    return value.encode(errors="replace").decode()  # JSON can spell half a surrogate pair


@dataclass
class ChatReader:
    """Converts JSON lines to conversations; ``counted`` counts what the last pass over all files left out."""

    template: ChatTemplate
    counted: Counter[str]

    def read(self, row: Any, place: str) -> tuple[str, Answers]:
        """Return text and answers of a line's value, or no text if it has no answer; raises ValueError with
        ``place``."""
        if not isinstance(row, dict):
            raise ValueError(f"{place}: a conversation is an object, got {type(row).__name__}")
        messages = messages_of(row, place, self.counted)
        if not any(message["role"] == "assistant" for message in messages):
            self.counted[WITHOUT_ANSWER] += 1
            return "", ()
        try:
            return self.template.conversation(messages)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None


class ChatEncoder:
    """Encodes text with special tokens as transformers does; ``definition`` is a ``tokenizer.json``'s text."""

    def __init__(self, definition: str) -> None:
        self._definition = Definition.from_str(definition)
        self._definition.encode_special_tokens = False
        self._definition.no_truncation()
        self._definition.no_padding()

    def begins_within_a_token(self, text: str, answers: Answers) -> bool:
        """Return whether the first answer begins inside a token: then generation never starts as in training."""
        if not answers:
            return False
        before = text[: answers[0][0]]
        (ids, _), (so_far, _) = self.encode([text, before], [(), ()])
        return ids[: len(so_far)].tolist() != so_far.tolist()

    def encode(self, texts: Sequence[str], answers: Sequence[Answers]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Return for every text its ids, (n,) uint32, and a mask of answers, (n,) bool; no bos or eos is added."""
        found = []
        for one, spans in zip(
            self._definition.encode_batch(list(texts), add_special_tokens=False), answers, strict=True
        ):
            begin, end = np.array(one.offsets or np.zeros((0, 2)), np.int64).T
            is_answer = np.zeros(len(begin), bool)
            for first, last in spans:
                is_answer |= (end > first) & (begin < last)
            found.append((np.array(one.ids, np.uint32), is_answer))
        return found
