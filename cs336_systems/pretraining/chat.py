"""Conversations as text, by a tokenizer's own chat template, and which characters and tokens of it are answers.

    template = ChatTemplate.find(Path("Qwen2.5-0.5B-Instruct"))
    messages = messages_of({"prompt": "2 + 2?", "completion": "4"}, "line 1", Counter())
    text, answers = template.conversation(messages)             # answers: (first, last + 1) characters of each
    ((ids, is_answer),) = ChatEncoder(tokenizer.json()).encode([text], [answers])

Templates are Jinja, run in its sandbox with the tags, filters and functions that transformers gives them, so text and
tokens are those of ``apply_chat_template``. As there, text of a message that spells a special token is that token.

Where a template marks answers by ``{% generation %}``, those are the answers. Of others an answer begins where the
template, asked for the next answer, would let the model begin, and ends with the end of its turn, without the white
space behind. Tools are not rendered: messages of tools and answers that only call one are left out and counted.
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
"""These are counted while conversations are read."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that data give a message's reasoning; transformers hands it on by the first two, and so does this."""
_BEGIN, _END, _PROBE = "\ue0f0\ue0f1", "\ue0f1\ue0f0", "\ue0f2probe\ue0f2"
"""Private characters, which no tokenizer's template has: around answers, and in the place of one."""

Answers = tuple[tuple[int, int], ...]
"""(First, last + 1) character of each answer of a text."""


class _Generation(Extension):
    """``{% generation %}`` .. ``{% endgeneration %}``: what is between is an answer."""

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
        source: in Jinja.
        special_tokens: what the template calls bos_token, eos_token and so on.

    Raises:
        ValueError: it is no template.
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
        """The template of a tokenizer's folder, or of a file; special tokens are those of the tokenizer's config.

        Args:
            tokenizer: a ``tokenizer.json`` or its folder; None for one that is made here.
            eos: the end of text, whatever the config says.
            advice: ends the sentence that there is no template.

        Raises:
            ValueError: there is none, or no tokenizer.
            OSError: it cannot be read.
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
        """The text of a conversation, and with ``answer_next`` what lets the model begin its answer.

        Raises:
            ValueError: the template refuses the conversation, as for roles that do not alternate.
        """
        return self._rendered(messages, answer_next).replace(_BEGIN, "").replace(_END, "")

    def _rendered(self, messages: Sequence[Mapping[str, Any]], answer_next: bool) -> str:
        shared = {"tools": None, "documents": None, "add_generation_prompt": answer_next}
        try:
            return self._template.render(messages=list(messages), **(self._special_tokens | shared))
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from None
        except Exception as error:  # a template is a program: it may divide by zero, or call itself without end
            raise ValueError(f"the chat template fails on the conversation: {error}") from None

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, Answers]:
        """The text of a conversation, and where its answers are; raises as ``render``, or if that is unclear."""
        marked = self._rendered(messages, False)
        text = marked.replace(_BEGIN, "").replace(_END, "")
        if _BEGIN in marked:
            return text, tuple(_marked(marked))
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return text, tuple(self._answer(messages, i, text) for i in answers)

    def stops(self, encoder: "ChatEncoder", eos_id: int) -> frozenset[int]:
        """The token that ends an answer, one of its own or the end of text; none if the template writes neither."""
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
        # What follows the end of a turn, as a line's end, is never generated: generation stops at that end.
        kept = end_of_turn.rstrip()
        return len(before), len(text) - len(rest) + len(kept)


def _marked(text: str) -> Iterator[tuple[int, int]]:
    """The spans between marks, counted without these."""
    before, *parts = text.split(_BEGIN)
    done = len(before)
    for part in parts:
        inside, _, outside = part.partition(_END)
        yield done, done + len(inside)
        done += len(inside) + len(outside)


def messages_of(row: Mapping[str, Any], place: str, counted: Counter[str]) -> list[dict[str, Any]]:
    """The messages of a JSON line: under ``messages``, or its ``prompt`` and ``completion``, each text or messages.

    Args:
        counted: is told what is left out.

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
    """JSON lines to conversations; ``counted`` says what the last pass over all files has left out."""

    template: ChatTemplate
    counted: Counter[str]

    def read(self, row: Any, place: str) -> tuple[str, Answers]:
        """Text and answers of a line's value; no text if there is no answer. Raises ValueError with the place."""
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
    """Text with special tokens in it to ids, as transformers has it; ``definition`` is a ``tokenizer.json``'s text."""

    def __init__(self, definition: str) -> None:
        self._definition = Definition.from_str(definition)
        self._definition.encode_special_tokens = False
        self._definition.no_truncation()
        self._definition.no_padding()

    def begins_within_a_token(self, text: str, answers: Answers) -> bool:
        """Whether a text's first answer does not begin with a token: then a model is never asked what it learned."""
        if not answers:
            return False
        before = text[: answers[0][0]]
        (ids, _), (so_far, _) = self.encode([text, before], [(), ()])
        return ids[: len(so_far)].tolist() != so_far.tolist()

    def encode(self, texts: Sequence[str], answers: Sequence[Answers]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """(ids (n,) uint32, whether each is of an answer (n,) bool) of every text, nothing before it or behind."""
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
