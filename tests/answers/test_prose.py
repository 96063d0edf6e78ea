"""Numbers in templates: typed ones are found, with their line; quoted, named and set ones are left alone."""

import pytest

from cs336_systems.answers.prose import typed_numbers


def typed(text):
    """The numbers that a template of this text is blamed for."""
    return [sentence.split("'")[1] for sentence in typed_numbers({"page.md": text})]


@pytest.mark.parametrize(
    "number",
    [
        *("129 GiB", "5.364 ms", "9.3 GiB", "434", "318", "218", "1,260", "0.15", "16 times", "3x", "2×", "40 %", "5%"),
        *("400 Gbit/s", "7 s", "12 µs", "30 TFLOP/s", "4 tokens/s", "700 W", "3.2.", "512 MiB", "1024 ms"),
    ],
)
@pytest.mark.parametrize(
    "around", ["it is {} here", "**{}**", "- {}", "# {}", "| a | {} |", "({})", "{}\n{{{{ x }}}} ms"]
)
def test_a_typed_number_is_found_wherever_it_stands(number, around):
    assert typed(around.format(number)) == [number.rstrip(".")]


def test_markup_between_a_number_and_its_unit_hides_nothing():
    assert typed("**12** ms") == ["12** ms"]
    assert typed("a 12-GiB block") == ["12-GiB"]
    assert typed("12\u00a0ms") == [r"12\xa0ms"]


@pytest.mark.parametrize(
    "text",
    [
        "batch 4, context 512, 65,536 tokens, 100 or 1,000 steps, in 2026",
        "on an H100, `2.7b` and 2.7b, sm80, ZB-H1, 1F1B",
        "d_model 2560 and d_ff 10240; vocabulary 151,936; XXL has 53248",
        "torch 2.11, Triton 3.6, ptxas 13.3, Python (3.11 or newer), 2.11.0",
        "4 × 512 × 2560 bytes, 8 × 8, 6 B D F / (N C), N / 2 times, N/2 times, 10⁵, 2 (n − 1)/n",
        "`318 ms` and\n\n```bash\n318 ms\n```\n\n    318 ms\n\n<!-- 318 ms -->[a](b-318.png) https://a.b/318",
        "*Question of 318 ms\nand 434 lines?*\n",
        '{{ model("318 ms", 434)["9.3"] | fixed(2) }} ms, {{ 4 * x / GIB }}, {{ given("318 ms") }}',
        '{% set y = rows("318", n=434) %}{# 318 ms #}{% for a in b %}{{ a["318"] }}{% endfor %}',
    ],
)
def test_settings_names_code_questions_and_calls_are_left_alone(text):
    assert typed(text) == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("{{ 434 }}", "{{ 434 }}"),
        ("{{ (400 + 34) | fixed }}", "{{ 34 }}"),
        ("{% set n = 4 %}", "{{ 4 }}"),
        ('{{ "9.3 GiB" }}', "9.3 GiB"),
        ('{{ x ~ " 129 GiB" }}', "129 GiB"),
        ('{{ "318" if x else y }}', "318"),
    ],
)
def test_constants_that_an_expression_shows_are_typed_numbers(text, number):
    assert number in typed(text)


def test_each_is_named_with_its_template_and_line():
    text = "# T\n\n```\ncode\n```\n{% set a = b(\n1) %}\nit is 318\n\n{{ x }} and\n{{ 434 }}\n"
    assert typed_numbers({"b.md": "5.364", "a.md": text}) == [
        "a.md.jinja, line 8: '318' is typed, not quoted",
        "a.md.jinja, line 11: '{{ 434 }}' is typed, not quoted",
        "b.md.jinja, line 1: '5.364' is typed, not quoted",
    ]
