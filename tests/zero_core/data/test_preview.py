import io
import json
import sys
from pathlib import Path

import pytest

from tests.tiny_model import byte_tokenizer
from zero_core.data.notes import Note
from zero_core.data.preview import as_json, main, preview, write
from zero_core.data.template_settings import TemplateSettings

CHAT = {
    "messages": [
        {"role": "user", "content": "\x1b[31mq"},
        {"role": "assistant", "content": "a", "reasoning_content": "hm"},
    ]
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _file(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_what_is_learnt_is_marked(tmp_path: Path, model: Path) -> None:
    file = _file(tmp_path / "f", CHAT, CHAT, CHAT)
    first, second = preview(file, model, TemplateSettings(), examples=2)
    assert (first.line, second.line, first.notes) == (1, 2, (Note.REASONING_LEFT_OUT,))
    out = io.StringIO()
    write(first, out, colour=False)
    # A conversation's own escape codes are shown, not sent to the terminal.
    assert out.getvalue() == (
        "--- line 1: 28 tokens, 2 learnt\n"
        "<|im_start|>user\n\\x1b[31mq<|im_end|>\n<|im_start|>assistant\n⟦a<|im_end|>⟧\n\n"
        f"    note reasoning_left_out: {Note.REASONING_LEFT_OUT.sentence}\n"
    )
    coloured = io.StringIO()
    write(first, coloured, colour=True)
    assert "\x1b[1;32ma<|im_end|>\x1b[0m\n" in coloured.getvalue()


def test_as_a_command(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _file(tmp_path / "f", CHAT)
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ say }}{{ m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ say }}{% endif %}"
    )
    own = ["--chat-template", str(template), "--chat-template-kwargs", '{"say": "So: "}']
    monkeypatch.setattr(sys, "argv", ["preview", str(file), "--model", str(model), "--json", *own])
    assert main() == 0
    shown = json.loads(capsys.readouterr().out)
    (expected,) = preview(file, model, TemplateSettings(template.read_text(), {"say": "So: "}), examples=1)
    assert shown == as_json(expected)
    assert shown["sequences"] == [
        {
            "tokens": 17,
            "target_tokens": 2,
            "pieces": [
                {"text": "So: \x1b[31mq<|im_end|>So: ", "learnt": False},
                {"text": "a<|im_end|>", "learnt": True},
            ],
        }
    ]
    file.write_text('{"messages": 1}\n')
    assert main() == 1
    assert capsys.readouterr().err.startswith("error: training_file: line 1 has a number in messages")


def test_a_conversation_that_the_template_refuses_is_named(tmp_path: Path, model: Path) -> None:
    file = _file(tmp_path / "f", CHAT)
    settings = TemplateSettings("{{ raise_exception('never') }}")
    with pytest.raises(ValueError, match=r"line 1: is refused by the model's chat template: never"):
        list(preview(file, model, settings, examples=1))
