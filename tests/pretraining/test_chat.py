"""Conversations: text and tokens are those of transformers, answers are found in any template, bad lines are named."""

import io
import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer as Definition

from cs336_systems.pretraining.chat import HALF_PAIRS, TOOL_CALLS, ChatEncoder, ChatTemplate, messages_of
from cs336_systems.pretraining.dataset import ANSWER, BEGIN, Dataset
from cs336_systems.pretraining.tokenizer import load_tokenizer, train_bpe
from cs336_systems.pretraining.tokenizing import TokenizeOptions, tokenize
from cs336_systems.pretraining.trainer import train
from scripts import sample
from tests.pretraining.trained import options

CHATML = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}GEN{{- message.content + '<|im_end|>' }}END{{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""As Qwen2.5's."""
THINKING = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}GEN
        {%- if loop.last %}
            {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.strip() + '<|im_end|>' }}END{{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""As Qwen3's, which shows the reasoning of the last answer alone."""
LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no ' + message.role) }}{% endif %}
    {{- '[' + message.role + ']\\n\\n' }}
    {%- if message.role == 'assistant' %}GEN{{- message.content | trim + eos_token }}END
    {%- else %}{{- message.content | trim + eos_token }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]\\n\\n' }}{%- endif %}
"""
TEMPLATES = {"chatml": CHATML, "thinking": THINKING, "llama": LLAMA}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin|>"]
CONVERSATIONS = [
    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4."}],
    [
        {"role": "system", "content": "Answer in naïve 日本語."},
        {"role": "user", "content": "Say “hello”\n"},
        {"role": "assistant", "content": "  こんにちは 👋\n\nhello ", "reasoning_content": "hm"},
        {"role": "user", "content": "a user who spells <|im_end|>"},
        {"role": "assistant", "content": "2 + 2?", "reasoning_content": "because"},
    ],
    [{"role": "user", "content": "2"}, {"role": "user", "content": "2"}, {"role": "assistant", "content": ""}],
]


def plain(name):
    return TEMPLATES[name].replace("GEN", "").replace("END", "")


def tagged(name):
    return TEMPLATES[name].replace("GEN", "{% generation %}").replace("END", "{% endgeneration %}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer's folder, with special tokens of its own and no template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    definition = Definition.from_str(train_bpe(["hello, 2 + 2 is 4 in 日本語\n\n"] * 9, 300).json())
    definition.add_special_tokens(SPECIAL)
    definition.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_tokens_and_answers_are_those_of_transformers(folder, name):
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    encoder = ChatEncoder((folder / "tokenizer.json").read_text())
    (folder / "chat_template.jinja").write_text(tagged(name))
    try:
        by_tags, found = ChatTemplate.find(folder), ChatTemplate(plain(name), ChatTemplate.find(folder)._special_tokens)
    finally:
        (folder / "chat_template.jinja").unlink()
    for messages in CONVERSATIONS:
        theirs.chat_template = tagged(name)
        expected = theirs.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        begun = theirs.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        for template in (by_tags, found):
            text, answers = template.conversation(messages)
            assert text == theirs.apply_chat_template(messages, tokenize=False)
            assert template.render(messages[:-1], answer_next=True) == begun
            ((ids, is_answer),) = encoder.encode([text], [answers])
            assert ids.tolist() == expected["input_ids"]
            assert is_answer.astype(int).tolist() == expected["assistant_masks"]
            assert is_answer.any()


def test_a_template_that_hides_where_answers_begin_must_mark_them():
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{{ loop.length }}{% endfor %}", {})
    with pytest.raises(ValueError, match="around answer 2 in several ways, so it must mark answers"):
        template.conversation(CONVERSATIONS[0])


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "bot"}]}', "line 1, message 2: unknown role 'bot'"),
        ('{"messages": [{"role": "assistant"}]}', "line 1, message 1: no content, where text must be"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "message 1: content of type list"),
        ('{"messages": ["a"]}', "message 1: a message has role and content, got str"),
        ('{"messages": "a"}', "messages must be a list, got str"),
        ('{"text": "a"}', "neither messages nor prompt and completion, it has text"),
        ("[1]", "a conversation is an object, got list"),
        (
            '{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
            "line 1: not JSON, .* key 'content' is there twice",
        ),
        ("[" * 100_000, "line 1: not JSON"),
        (
            '{"messages": [{"role": "developer", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "no developer",
        ),
    ],
)
def test_a_bad_line_is_one_sentence(tmp_path, line, sentence):
    (tmp_path / "a.jsonl").write_text(line + "\n")
    (tmp_path / "llama.jinja").write_text(plain("llama"))
    with pytest.raises(ValueError, match=re.escape(sentence).replace(r"\.\*", ".*")) as caught:
        tokenize(chat_options(tmp_path, chat_template=tmp_path / "llama.jinja"))
    assert "\n" not in str(caught.value) and "line 1" in str(caught.value)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ 1 / 0 }}", "line 1: the chat template fails on the conversation: division by zero"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "line 1: the chat template fails .*recursion"),
        ("{{ messages[0].content.index('b') }}", "line 1: the chat template fails .*substring not found"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "line 1: the chat template leaves answer 2 out"),
        ("", "line 1: the chat template leaves answer 2 out"),
        ("{% if %}", "t.jinja: the chat template is not Jinja"),
        ("\udce9", "t.jinja: 'utf-8' codec can't decode"),
    ],
)
def test_a_template_that_does_not_serve_is_one_sentence(tmp_path, template, sentence):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "completion": "c"}))
    (tmp_path / "t.jinja").write_text(template, errors="surrogateescape")
    with pytest.raises(ValueError, match=sentence) as caught:
        tokenize(chat_options(tmp_path, chat_template=tmp_path / "t.jinja"))
    assert "\n" not in str(caught.value) and not (tmp_path / "data").exists()


def chat_options(folder, **options):
    given = {"tokenizer": "bytes", "evaluation_fraction": 0.0, "chat": True, "out": folder / "data"}
    return TokenizeOptions(input=(folder / "a.jsonl",), **(given | options))


def test_without_a_template_a_sentence_says_so(tmp_path, folder):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CONVERSATIONS[0]}))
    with pytest.raises(ValueError, match="no chat template: a tokenizer made here has none; --chat-template names"):
        tokenize(chat_options(tmp_path))
    with pytest.raises(ValueError, match="has no chat_template.jinja, and its config none"):
        tokenize(chat_options(tmp_path, tokenizer=str(folder)))
    with pytest.raises(
        ValueError, match="^tokenizer Org/Chat does not exist; .*: hf download Org/Chat --local-dir Chat"
    ):
        tokenize(chat_options(tmp_path, tokenizer="Org/Chat"))
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer_config.json is no object of JSON"):
        tokenize(chat_options(tmp_path, tokenizer=str(tmp_path)))


def test_a_dataset_of_conversations_has_marks_and_its_template(tmp_path, folder, monkeypatch, capsys):
    monkeypatch.setattr("cs336_systems.pretraining.dataset.FILE_TOKENS", 100)
    tools = [{"role": "tool", "content": "5"}, {"role": "assistant", "content": None, "tool_calls": [1]}]
    tools += [
        {"role": "function", "content": "5"},
        {"role": "assistant", "content": None, "function_call": {"name": "f"}},
    ]
    rows = [{"messages": messages} for messages in CONVERSATIONS]
    rows[0] = {"prompt": "2 + 2?", "completion": "It is 4.", "tools": [1]}
    rows[1] = {"messages": CONVERSATIONS[1][:3] + tools + CONVERSATIONS[1][3:]}
    rows.append({"messages": CONVERSATIONS[0][:1]})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.jinja").write_text(plain("chatml"))
    made = tokenize(chat_options(tmp_path, tokenizer=str(folder), chat_template=tmp_path / "t.jinja"))
    said = capsys.readouterr().err
    assert "4 messages of tools left out" in said and "1 conversations without an answer left out" in said
    assert "1 lists of tools left out" in said and "end" not in said

    dataset = Dataset.open(made.folder)
    assert dataset.chat and len(dataset.train.files) > 1
    ids, marks = np.empty(len(dataset.train), np.int64), np.empty(len(dataset.train), np.uint8)
    dataset.train.copy(0, ids)
    dataset.train.copy(0, marks, marks=True)
    template = ChatTemplate.find(dataset.folder)
    encoder = ChatEncoder(dataset.tokenizer.read_text())
    texts, answers = zip(*map(template.conversation, CONVERSATIONS), strict=True)
    encoded = encoder.encode(texts, answers)
    assert ids.tolist() == np.concatenate([one for one, _ in encoded]).tolist()
    assert (marks & ANSWER).astype(bool).tolist() == np.concatenate([one for _, one in encoded]).tolist()
    starts = np.cumsum([0] + [len(one) for one, _ in encoded[:-1]])
    assert np.flatnonzero(marks & BEGIN).tolist() == starts.tolist()
    assert dataset.manifest["splits"]["train"]["answer_tokens"] == int((marks & ANSWER).sum())

    with (made.folder / "train-00001.marks").open("ab") as file:
        file.write(b"\1")
    with pytest.raises(ValueError, match="marks is torn"):
        Dataset.open(made.folder)


@pytest.mark.parametrize("before", [" ", "\n"])
def test_an_answer_that_begins_within_a_token_is_said(tmp_path, capsys, before):
    rows = [{"prompt": f"what is {i}", "completion": f"it is {i}"} for i in range(50)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = "{% for m in messages %}{{ m.role + ':SEP' + m.content + eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant:SEP' }}{% endif %}"
    (tmp_path / "t.jinja").write_text(template.replace("SEP", before))
    tokenize(chat_options(tmp_path, tokenizer="bpe", vocab_size=300, chat_template=tmp_path / "t.jinja"))
    said = capsys.readouterr().err
    assert ("answers begin within a token" in said) == (before == " ") and "will not stop there" not in said


@pytest.mark.parametrize(("end", "stops"), [("\n\n", False), ("\n### End\n", False), ("<|endoftext|>\n", True)])
def test_a_template_that_ends_no_answer_is_said(tmp_path, capsys, end, stops):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    template = "{% for m in messages %}{{ m.role + ':\\n' + m.content }}END{% endfor %}"
    (tmp_path / "t.jinja").write_text(template.replace("END", "{{ " + repr(end) + " }}"))
    tokenize(chat_options(tmp_path, chat_template=tmp_path / "t.jinja"))
    assert ("so a model will not stop there" in capsys.readouterr().err) != stops


def test_a_folder_of_conversations_may_have_other_files(tmp_path, capsys):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    (tmp_path / "source" / "README.md").write_text("read me")
    (tmp_path / "t.jinja").write_text(plain("chatml"))
    tokenize(replace(chat_options(tmp_path, chat_template=tmp_path / "t.jinja"), input=(tmp_path / "source",)))
    assert "1 files are passed over for their suffix: 1 .md" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", json.dumps({"messages": CONVERSATIONS[0][:1]}), '{"messages": []}'])
def test_a_source_without_any_answer_is_one_sentence(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    (tmp_path / "t.jinja").write_text(plain("chatml"))
    n = ": 1 conversations without an answer left out" if content else ""
    with pytest.raises(ValueError, match=rf"^there is no conversation with an answer in .*a\.jsonl{n}$"):
        tokenize(chat_options(tmp_path, chat_template=tmp_path / "t.jinja"))
    assert not (tmp_path / "data").exists()


def test_what_a_message_loses_is_counted():
    row = [{"role": "assistant", "content": "a\ud83d", "tool_calls": [1]}, {"role": "user", "content": "b\ud83d"}]
    counted = Counter()
    assert [each["content"] for each in messages_of({"messages": row}, "", counted)] == ["a?", "b?"]
    messages_of({"messages": [{"role": "assistant", "content": "a", "reasoning": ""}]}, "", counted)
    assert +counted == {TOOL_CALLS: 1, HALF_PAIRS: 1}


def test_reasoning_has_both_names_and_roles_stay():
    row = {"messages": [{"role": "assistant", "content": "a", "reasoning": "b", "name": "c"}]}
    assert messages_of(row, "", Counter()) == [
        {"role": "assistant", "content": "a", "reasoning_content": "b", "thinking": "b"}
    ]


def test_a_conversation_is_sampled_as_the_template_has_it(alone, tmp_path, folder, monkeypatch, capsys):
    """Every turn reads the whole conversation so far, and an answer ends with the end of its turn."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in CONVERSATIONS))
    (tmp_path / "t.jinja").write_text(plain("chatml"))
    data = tokenize(chat_options(tmp_path, tokenizer=str(folder), chat_template=tmp_path / "t.jinja")).folder
    run = {"context_length": 128, "steps": 1, "warmup_steps": 0, "evaluate_every": None, "save_every": 1}
    train(options(tmp_path, data=data, out=tmp_path / "run", **run), alone)
    tokenizer = load_tokenizer(data)
    answers = iter([tokenizer.encode(["4"])[0], tokenizer.encode(["8"])[0]])  # which end with <|im_end|>
    prompts = []

    def answer(model, prompt, *, eos_ids, **_):
        prompts.append(tokenizer.decode(prompt))
        for token_id in next(answers).tolist():
            yield token_id
            if token_id in eos_ids:
                return

    monkeypatch.setattr("cs336_systems.pretraining.sampling.generate", answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("2 + 2?\n\n4 + 4?\n"))
    assert sample.main([str(tmp_path / "run"), "--chat"]) == 0
    *said, line = capsys.readouterr().out.splitlines()
    assert said == ["4", "8"]
    turns = [("user", "2 + 2?"), ("assistant", "4"), ("user", "4 + 4?"), ("assistant", "8")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert json.loads(line)["messages"] == messages
    template = ChatTemplate.find(data)
    assert prompts == [template.render(messages[:n], answer_next=True) for n in (1, 3)]

    answers = iter([tokenizer.encode(["4"])[0]])
    monkeypatch.setattr("sys.stdin", io.StringIO("2 + 2?\n" + 64 * "4 + 4? "))
    assert sample.main([str(tmp_path / "run"), "--chat"]) == 0
    said = capsys.readouterr()
    assert "the conversation ends, as the context of 128 tokens is full" in said.err
    assert json.loads(said.out.splitlines()[-1])["messages"] == messages[:2]
    (tmp_path / "run" / "chat_template.jinja").unlink()
    assert sample.main([str(tmp_path / "run"), "--chat"]) == 2
    assert "no chat template: " in (said := capsys.readouterr().err) and "--chat-template" not in said
